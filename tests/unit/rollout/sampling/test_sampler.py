"""Sampling of groups: concurrency, failures, regeneration and cancellation."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from services.common.errors import UnavailableError
from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import ModelSpec
from services.common.telemetry import tracing
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt, PromptStore
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.failures import CallError, GroupError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.progress_cache import (
    GroupProgress,
    MemberProgress,
    decode_progress,
    encode_progress,
)
from services.rollout.sampling.sample import Sample, sample_fields, sample_tags
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.rollout.worker import RolloutServicer
from services.rollout.workflows.base import Episode, SingleTurn
from services.rollout.workflows.turns import Turn
from services.wire.workers import GroupAssignment
from slipstream.rollout.v1 import rollout_pb2 as pb
from tests.helpers.columns import rows_of
from tests.helpers.engines import made, make_engine, running, until, weights_of

ROWS = [{"prompt": text, "answer": "x"} for text in ("12=", "345=", "", "6" * 40, "é", 7)]


class Outcome:
    """Fake publisher that collects finished and failed groups."""

    def __init__(self) -> None:
        self.published: dict[str, list[Sample]] = {}
        self.failed: dict[str, GroupError] = {}
        self.changed = asyncio.Event()

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        self.published[assignment.group_id] = samples
        self.changed.set()

    async def report(self, failures: Sequence[Failure]) -> None:
        self.failed |= {assignment.group_id: error for assignment, error in failures}
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        while len(self.published) + len(self.failed) < count:
            await self.changed.wait()
            self.changed.clear()


class MemoryCache:
    """Progress cache in memory."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], dict[str, Tensor]] = {}

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        result: dict[str, dict[int, MemberProgress]] = {}
        for (group_id, member), row in self.rows.items():
            if group_id in first_attempts:
                result.setdefault(group_id, {})[member] = decode_progress(row)
        return result

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None:
        for group_id, members in groups.items():
            for member, progress in members.items():
                self.rows[group_id, member] = encode_progress(progress)

    async def delete_progress(self, group_id: str, members: Collection[int]) -> None:
        for member in members:
            self.rows.pop((group_id, member), None)


class ScoreBy:
    """Scorer that calls a function."""

    def __init__(self, function: Callable[[RewardInput], float]) -> None:
        self.function = function
        self.calls = 0

    async def score(self, reward_input: RewardInput) -> Score:
        self.calls += 1
        return Score(self.function(reward_input))


def tokenizer() -> Tokenizer:
    return load_tokenizer(
        ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=abcdefghijk")
    )


def assignment(group_id: str, row: int = 0, **changes: Any) -> GroupAssignment:
    values = {
        "attempt": 1,
        "split": "train",
        "partition_id": "run/train",
        "seeds": (11, 12, 13),
        "temperatures": (1.0, 1.0, 0.0),
    } | changes
    values.setdefault("members", tuple(range(len(values["seeds"]))))
    return GroupAssignment(group_id=group_id, row=row, **values)


@asynccontextmanager
async def sampling(
    reward: Any,
    *,
    workflow: Any = None,
    cache: MemoryCache | None = None,
    comparison: Any = None,
    **changes: Any,
) -> AsyncIterator[tuple[GroupSampler, Outcome, TorchEngine]]:
    outcome, engine = Outcome(), make_engine()
    spec = RolloutSpec(
        rewards=[{"name": "unused"}],  # type: ignore[arg-type]  # pydantic converts
        **({"max_response_tokens": 6} | changes),
    )
    data = DataSpec(train={"source": "jsonl", "path": "rows"}, max_prompt_tokens=20)  # type: ignore[arg-type]
    sampler = GroupSampler(
        PromptStore(data, {"train": ROWS}, tokenizer()),
        GroupServices(
            engine=engine,
            tokenizer=tokenizer(),
            workflow=workflow or SingleTurn(),
            reward=reward,
            calls=CallPool(2),
            comparison=lambda _: comparison,
        ),
        spec,
        publisher=outcome,
        cache=cache or MemoryCache(),
        report_failures=outcome.report,
    )
    async with running(engine), sampler:
        yield sampler, outcome, engine


async def test_groups_are_published_whole_with_fields_and_tags_that_agree() -> None:
    async with sampling(ScoreBy(lambda reward_input: float(len(reward_input.response)))) as (
        sampler,
        outcome,
        _,
    ):
        sampler.start([assignment("a"), assignment("b", 1)])
        await outcome.wait_for(2)
    samples = outcome.published["a"]
    fields = {name: rows_of(values) for name, values in sample_fields(samples).items()}
    prompt = PromptStore(
        DataSpec(train={"source": "jsonl", "path": "rows"}),  # type: ignore[arg-type]
        {"train": ROWS},
        tokenizer(),
    ).prompt("train", 0)
    tags = sample_tags(samples, prompt, group_id="a", attempt=1)
    for index, sample in enumerate(samples):
        num_tokens = len(fields["response_ids"][index])
        assert (
            num_tokens == len(fields["rollout_logprobs"][index]) == tags["response_tokens"][index]
        )
        assert fields["response_mask"][index].all()
        assert fields["version_runs"][index].tolist() == [[-1, num_tokens]]
        assert float(fields["rewards"][index]) == tags["reward"][index] == sample.score.value
    assert tags["greedy"] == [0, 0, 1]
    assert tags["member"] == [0, 1, 2]
    assert tags["prompt_tokens"] == [3, 3, 3]


async def test_the_rollout_starts_the_traces_of_held_out_groups_only() -> None:
    spans: list[tracing.Span] = []
    splits = ("train", "train.sums", "heldout", "heldout.sums")
    with tracing.collecting(spans.append, ratio=1.0):
        async with sampling(ScoreBy(lambda _: 0.0)) as (sampler, outcome, _):
            sampler.start([assignment(split, split=split) for split in splits])
            await outcome.wait_for(4)
    first = {
        span.trace.trace_id for span in spans if span.name == "rollout.group" and not span.parent_id
    }
    assert first == {tracing.of_group("run", split).trace_id for split in splits[2:]}


async def test_rewards_can_see_every_message_of_an_episode() -> None:
    class AgentWithResult:
        async def run(self, episode: Episode) -> None:
            await episode.generate(max_tokens=2)
            await episode.observe(result)
            await episode.generate()

    async def result() -> str:
        return "7"

    def look(reward_input: RewardInput) -> float:
        histories.append(reward_input.episode())
        return 1.0

    histories: list[Any] = []
    async with sampling(ScoreBy(look), workflow=AgentWithResult()) as (sampler, outcome, _):
        sampler.start([assignment("a", seeds=(5,), temperatures=(1.0,))])
        await outcome.wait_for(1)
    (history,) = histories
    (sample,) = outcome.published["a"]
    roles = [message["role"] for message in history["messages"]]
    assert roles[:3] == ["user", "assistant", "tool"]
    tokens = [token for message in history["messages"][1:] for token in message["token_ids"]]
    assert tokens == sample.response_ids
    assert history["messages"][2]["content"] == "7"
    assert 0 < history["messages"][1]["seconds"] <= history["seconds"]


async def test_a_prompt_that_a_workflow_rendered_again_is_the_one_that_is_scored_and_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Renders:
        async def run(self, episode: Episode) -> None:
            assert episode.num_segments == 0
            if episode.limits.seed != 5:
                token_ids = tuple(tokenizer().encode("1=abc"))
                episode.prompt = replace(episode.prompt, token_ids=token_ids)
            await episode.generate()

    def opens_reasoning(reward_input: RewardInput) -> float:
        return float(reward_input.opens_reasoning)

    monkeypatch.setattr("services.rollout.sampling.group.BEGIN", "abc")
    async with sampling(ScoreBy(opens_reasoning), workflow=Renders()) as (sampler, outcome, _):
        sampler.start([assignment("a", seeds=(5, 6), temperatures=(1.0, 1.0))])
        await outcome.wait_for(1)
    prompts = [tokenizer().decode(sample.prompt_ids) for sample in outcome.published["a"]]
    assert prompts == ["12=", "1=abc"]
    assert [sample.score.value for sample in outcome.published["a"]] == [0.0, 1.0]


async def test_bad_prompts_are_rejected_one_by_one() -> None:
    expected = {
        2: "prompt_empty",
        3: "prompt_too_long",
        4: "prompt_malformed",
        5: "prompt_malformed",
    }
    async with sampling(ScoreBy(lambda _: 0.0)) as (sampler, outcome, _):
        sampler.start([assignment(f"g{row}", row) for row in (*range(6), 99)])
        await outcome.wait_for(7)
    assert set(outcome.published) == {"g0", "g1"}
    reasons = {int(name[1:]): error.reason for name, error in outcome.failed.items()}
    assert reasons == {**expected, 99: "prompt_unknown"}
    assert not any(error.retryable for error in outcome.failed.values())


def fail_first(count: int) -> ScoreBy:
    def score(reward_input: RewardInput) -> float:
        if reward.calls <= count:
            raise CallError("timeout", "too slow")
        return 1.0

    reward = ScoreBy(score)
    return reward


async def test_a_failed_reward_is_generated_again_with_another_seed() -> None:
    async with sampling(fail_first(2)) as (sampler, outcome, engine):
        sampler.start([assignment("a", seeds=(5,), temperatures=(1.0,))])
        await outcome.wait_for(1)
        assert engine.stats().tokens_total > 6
    assert outcome.published["a"][0].score.value == 1.0


async def test_a_reward_that_keeps_failing_fails_the_group_and_is_no_zero() -> None:
    async with sampling(fail_first(99)) as (sampler, outcome, _):
        sampler.start([assignment("a")])
        await outcome.wait_for(1)
    assert not outcome.published
    assert outcome.failed["a"].reason == "reward_timeout"
    assert outcome.failed["a"].retryable


async def test_masked_failures_train_no_token() -> None:
    async with sampling(fail_first(1), on_reward_failure="mask") as (sampler, outcome, _):
        sampler.start([assignment("a")])
        await outcome.wait_for(1)
    samples = outcome.published["a"]
    masks = rows_of(sample_fields(samples)["response_mask"])
    failed = [sample.finish_reason == "failed" for sample in samples]
    assert sorted(failed) == [False, False, True]
    assert [not bool(mask.any()) for mask in masks] == failed


async def test_an_attempt_starts_once_and_a_newer_one_replaces_it() -> None:
    async with sampling(ScoreBy(lambda _: 0.0), max_response_tokens=400) as (sampler, outcome, _):
        sampler.start([assignment("a")])
        sampler.start([assignment("a")])
        assert sampler.num_groups == 1
        sampler.start([assignment("a", attempt=2, row=1)])
        assert sampler.num_groups == 1
        await outcome.wait_for(1)
        sampler.start([assignment("a")])
        assert sampler.num_groups == 0


async def test_a_replica_that_shuts_down_rejects_groups() -> None:
    async with sampling(ScoreBy(lambda _: 0.0)) as (sampler, *_):
        sampler.refuse()
        with pytest.raises(UnavailableError):
            sampler.start([assignment("g1")])


async def test_cancelled_groups_leave_nothing_behind() -> None:
    async with sampling(ScoreBy(lambda _: 0.0), max_response_tokens=400) as (
        sampler,
        outcome,
        engine,
    ):
        sampler.start([assignment("a"), assignment("b")])
        await until(lambda: engine.stats().num_running == 6)
        sampler.cancel(["a", "unknown"])
        await outcome.wait_for(1)
        assert set(outcome.published) == {"b"}
        assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize("error", [KeyError("no"), SystemExit(3), asyncio.CancelledError()])
async def test_a_users_workflow_that_raises_fails_its_group_only(error: BaseException) -> None:
    class Picky:
        async def run(self, episode: Episode) -> None:
            if episode.prompt.text == "12=":
                raise error
            await episode.generate()

    async with sampling(ScoreBy(lambda _: 0.0), workflow=Picky()) as (sampler, outcome, _):
        sampler.start([assignment("a", 0), assignment("b", 1)])
        await outcome.wait_for(2)
    assert outcome.failed["a"].reason == "workflow_error"
    assert set(outcome.published) == {"b"}


async def test_an_observation_may_come_from_a_plain_function_and_has_tokens_only() -> None:
    class Observes:
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            is_first = episode.prompt.text == "12="
            await episode.observe(lambda: [3, 999] if is_first else [3])

    async with sampling(ScoreBy(lambda _: 0.0), workflow=Observes()) as (sampler, outcome, _):
        sampler.start([assignment("a", 0), assignment("b", 1)])
        await outcome.wait_for(2)
    assert outcome.failed["a"].reason == "workflow_invalid_value"
    assert set(outcome.published) == {"b"}


def test_undecodable_characters_of_an_error_are_escaped() -> None:
    error = GroupError("reward_exception", "bad \ud800 and \0", retryable=True)
    assert error.message == "bad \\ud800 and \\0"


async def test_a_workflow_that_samples_nothing_fails_its_group_only() -> None:
    class Mute:
        async def run(self, episode: Episode) -> None:
            if episode.prompt.text != "12=":
                await episode.generate()

    async with sampling(ScoreBy(lambda _: 0.0), workflow=Mute()) as (sampler, outcome, _):
        sampler.start([assignment("a", 0), assignment("b", 1)])
        await outcome.wait_for(2)
    assert outcome.failed["a"].reason == "workflow_invalid_value"

    assert set(outcome.published) == {"b"}


LONG: dict[str, Any] = {"max_response_tokens": 60, "partial_rollout": True}


async def test_interrupted_groups_resume_on_another_replica_with_the_same_tokens() -> None:
    groups = [
        assignment(f"g{index}", index % 2, seeds=(index, 50 + index, 9)) for index in range(6)
    ]
    score = ScoreBy(lambda reward_input: float(len(reward_input.response)))
    async with sampling(score, **LONG) as (sampler, whole, _):
        sampler.start(groups)
        await whole.wait_for(6)
    cache = MemoryCache()
    async with sampling(score, cache=cache, **LONG) as (sampler, first, engine):
        sampler.start(groups)
        await until(lambda: engine.stats().tokens_total >= 100)
        await sampler.interrupt()
        assert sampler.num_groups == engine.stats().num_running == engine.stats().num_waiting == 0
    cut = [name for name, error in first.failed.items() if error.reason == "interrupted"]
    assert sorted([*cut, *first.published]) == [group.group_id for group in groups]
    assert len(cut) >= 2
    async with sampling(score, cache=cache, **LONG) as (sampler, second, engine):
        sampler.start([replace(group, attempt=2) for group in groups if group.group_id in cut])
        await second.wait_for(len(cut))
        assert engine.stats().tokens_total < sum(
            len(sample.response_ids) for name in cut for sample in whole.published[name]
        )
    assert not cache.rows
    for name, samples in (first.published | second.published).items():
        for expected, resumed in zip(whole.published[name], samples, strict=True):
            assert resumed.response_ids == expected.response_ids
            assert resumed.score == expected.score


async def test_parked_groups_end_with_the_same_tokens() -> None:
    score = ScoreBy(lambda reward_input: float(len(reward_input.response)))
    async with sampling(score, **LONG) as (sampler, whole, _):
        sampler.start([assignment("a")])
        await whole.wait_for(1)
    longest = max(len(sample.response_ids) for sample in whole.published["a"])
    score.calls, cache = 0, MemoryCache()
    async with sampling(score, cache=cache, segment_tokens=2, **LONG) as (sampler, parts, engine):
        for attempt in range(1, 100):
            sampler.start([assignment("a", attempt=attempt)])
            await until(lambda: sampler.num_groups == 0)
            if parts.published:
                break
        total = sum(len(sample.response_ids) for sample in whole.published["a"])
        assert engine.stats().tokens_total == total
    assert longest / 2 <= attempt <= longest / 2 + 1
    assert score.calls == 3
    responses = [sample.response_ids for sample in parts.published["a"]]
    assert responses == [sample.response_ids for sample in whole.published["a"]]


async def test_a_checkpoint_is_enough_to_resume_after_a_crash() -> None:
    cache = MemoryCache()
    score = ScoreBy(lambda _: 1.0)
    async with sampling(score, cache=cache, **LONG) as (sampler, _, engine):
        sampler.start([assignment("a")])
        await until(lambda: engine.stats().tokens_total >= 30)
        await sampler.checkpoint()
        rows = dict(cache.rows)
    cached = sum(len(row["response_ids"]) for row in rows.values())
    assert cached >= 30
    cache.rows = rows
    async with sampling(score, cache=cache, **LONG) as (sampler, outcome, engine):
        sampler.start([assignment("a", attempt=2)])
        await outcome.wait_for(1)
        total = sum(len(sample.response_ids) for sample in outcome.published["a"])
        assert engine.stats().tokens_total == total - cached


async def test_storing_after_updates_takes_a_small_part_of_the_time_only() -> None:
    class Slow(MemoryCache):
        async def save(
            self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
        ) -> None:
            await asyncio.sleep(0.02)
            self.saves += 1

        saves = 0

    cache = Slow()
    async with sampling(ScoreBy(lambda _: 1.0), cache=cache, **LONG) as (sampler, _, engine):
        sampler.start([assignment("a")])
        await until(lambda: engine.stats().tokens_total >= 3)
        for _ in range(4):
            sampler.checkpoint_soon()
            await until(lambda: cache.saves == 1)
        assert cache.saves == 1
        sampler._next_checkpoint = 0.0  # makes the next checkpoint due
        sampler.checkpoint_soon()
        await until(lambda: cache.saves == 2)


async def test_an_interruption_while_a_reward_is_computed_keeps_the_response() -> None:
    class Stuck:
        async def score(self, reward_input: RewardInput) -> Score:
            scoring.set()
            await asyncio.Event().wait()
            return Score(0.0)

    scoring, cache = asyncio.Event(), MemoryCache()
    async with sampling(Stuck(), cache=cache, **LONG) as (sampler, outcome, _):
        sampler.start([assignment("a", seeds=(1,), temperatures=(1.0,))])
        await scoring.wait()
        await sampler.interrupt()
        assert outcome.failed["a"].reason == "interrupted"
    (row,) = cache.rows.values()
    async with sampling(ScoreBy(lambda _: 1.0), cache=cache, **LONG) as (sampler, outcome, engine):
        sampler.start([assignment("a", attempt=2, seeds=(1,), temperatures=(1.0,))])
        await outcome.wait_for(1)
        assert engine.stats().tokens_total == 0
    assert outcome.published["a"][0].response_ids == row["response_ids"].tolist()


async def test_responses_over_too_many_versions_fail_with_the_reason() -> None:
    class Stretched:
        async def run(self, episode: Episode) -> None:
            for version in range(3):
                await engines[0].adopt_weights(version, weights_of(version))
                await episode.generate(max_tokens=4)

    engines: list[TorchEngine] = []
    async with sampling(ScoreBy(lambda _: 1.0), workflow=Stretched(), max_segments=2, **LONG) as (
        sampler,
        outcome,
        engine,
    ):
        engines.append(engine)
        sampler.start([assignment("a", seeds=(1,), temperatures=(1.0,))])
        await outcome.wait_for(1)
    assert outcome.failed["a"].reason == "too_many_segments"


def test_a_sample_whose_logprobs_do_not_cover_its_tokens_is_rejected() -> None:
    turn = Turn(token_ids=(1, 2), logprobs=(0.0,), version_runs=((0, 2),), finish_reason="stop")
    sample = Sample(
        member=0,
        prompt_ids=(1,),
        turns=(turn,),
        score=Score(0.0),
        finish_reason="stop",
        is_greedy=False,
    )
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs"):
        sample_fields([sample])


async def test_an_interruption_whose_caller_leaves_still_returns_the_groups() -> None:
    class SlowCache(MemoryCache):
        saving, may_save = asyncio.Event(), asyncio.Event()

        async def save(self, *arguments: Any, **options: Any) -> None:
            self.saving.set()
            await self.may_save.wait()
            await super().save(*arguments, **options)

    cache = SlowCache()
    async with sampling(ScoreBy(lambda _: 1.0), cache=cache, **LONG) as (sampler, outcome, engine):
        servicer = RolloutServicer()
        servicer.attach(sampler)
        sampler.start([assignment("a")])
        await until(made(engine, 6))
        call = servicer.InterruptGroups(pb.InterruptGroupsRequest(), None)  # type: ignore[arg-type]
        interrupting = asyncio.create_task(call)
        await cache.saving.wait()
        interrupting.cancel()  # as if the controller died
        cache.may_save.set()
        async with asyncio.timeout(10):
            await outcome.wait_for(1)
    assert outcome.failed["a"].reason == "interrupted"
    assert cache.rows
