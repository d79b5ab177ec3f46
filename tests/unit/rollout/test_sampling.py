"""Groups: concurrency, failures, regeneration, cancellation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.spec.data import DataSpec
from services.common.spec.model import ModelSpec
from services.common.spec.rollout import RolloutSpec
from services.rollout.client import GroupAssignment
from services.rollout.engines.torch import TorchEngine
from services.rollout.failures import GroupError, RewardError
from services.rollout.prompts import Prompt, PromptBook
from services.rollout.rewards.base import RewardInput
from services.rollout.samples import Sample, sample_fields, sample_tags
from services.rollout.sampling import GroupSampler, Parts
from services.rollout.workflows.base import Episode, Turn
from services.rollout.workflows.single_turn import SingleTurn
from tests.unit.rollout.builders import make_engine, running, until

ROWS = [{"prompt": text, "answer": "x"} for text in ("12=", "345=", "", "6" * 40, "é", 7)]


class Outcome:
    """Takes what the sampler hands out."""

    def __init__(self) -> None:
        self.published: dict[str, list[Sample]] = {}
        self.failed: dict[str, GroupError] = {}
        self.changed = asyncio.Event()

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        self.published[assignment.group_id] = samples
        self.changed.set()

    async def report(self, assignment: GroupAssignment, error: GroupError) -> None:
        self.failed[assignment.group_id] = error
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        while len(self.published) + len(self.failed) < count:
            await self.changed.wait()
            self.changed.clear()


class ScoreBy:
    """A reward made of a function."""

    def __init__(self, function: Callable[[RewardInput], float]) -> None:
        self.function = function
        self.calls = 0

    async def score(self, given: RewardInput) -> float:
        self.calls += 1
        return self.function(given)


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
    return GroupAssignment(group_id=group_id, row=row, **values)


@asynccontextmanager
async def sampling(
    reward: ScoreBy, *, workflow: Any = None, **changes: Any
) -> AsyncIterator[tuple[GroupSampler, Outcome, TorchEngine]]:
    outcome, engine = Outcome(), make_engine()
    spec = RolloutSpec(
        rewards=[{"name": "unused"}],  # type: ignore[arg-type]  # pydantic converts
        **({"max_response_tokens": 6} | changes),
    )
    data = DataSpec(train={"source": "jsonl", "path": "rows"}, max_prompt_tokens=20)  # type: ignore[arg-type]
    parts = Parts(
        engine=engine,
        tokenizer=tokenizer(),
        prompts=PromptBook(data, {"train": ROWS}, tokenizer()),
        workflow=workflow or SingleTurn(),
        reward=reward,
        publisher=outcome,
        report_failure=outcome.report,
    )
    async with running(engine), GroupSampler(parts, spec) as sampler:
        yield sampler, outcome, engine


async def test_groups_are_published_whole_with_fields_and_tags_that_agree() -> None:
    async with sampling(ScoreBy(lambda given: float(len(given.response)))) as (sampler, outcome, _):
        sampler.start([assignment("a"), assignment("b", 1)])
        await outcome.wait_for(2)
    samples = outcome.published["a"]
    fields = sample_fields(samples)
    prompt = PromptBook(
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
        assert float(fields["rewards"][index]) == tags["reward"][index] == sample.reward
    assert tags["greedy"] == [0, 0, 1]
    assert tags["member"] == [0, 1, 2]
    assert tags["prompt_tokens"] == [3, 3, 3]


async def test_bad_prompts_are_refused_one_by_one() -> None:
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
    def score(given: RewardInput) -> float:
        if reward.calls <= count:
            raise RewardError("timeout", "too slow")
        return 1.0

    reward = ScoreBy(score)
    return reward


async def test_a_failed_reward_is_generated_again_with_another_seed() -> None:
    async with sampling(fail_first(2)) as (sampler, outcome, engine):
        sampler.start([assignment("a", seeds=(5,), temperatures=(1.0,))])
        await outcome.wait_for(1)
        assert engine.stats().tokens_total > 6
    assert outcome.published["a"][0].reward == 1.0


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
    masks = sample_fields(samples)["response_mask"]
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


async def test_a_users_workflow_that_raises_fails_its_group_only() -> None:
    class Picky:
        async def run(self, episode: Episode) -> None:
            if episode.prompt.text == "12=":
                raise KeyError("no")
            await episode.generate()

    async with sampling(ScoreBy(lambda _: 0.0), workflow=Picky()) as (sampler, outcome, _):
        sampler.start([assignment("a", 0), assignment("b", 1)])
        await outcome.wait_for(2)
    assert outcome.failed["a"].reason == "workflow_error"
    assert set(outcome.published) == {"b"}


def test_a_sample_whose_logprobs_do_not_cover_its_tokens_is_refused() -> None:
    turn = Turn(token_ids=(1, 2), logprobs=(0.0,), version_runs=((0, 2),), finish_reason="stop")
    sample = Sample(member=0, turns=(turn,), reward=0.0, finish_reason="stop", is_greedy=False)
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs"):
        sample_fields([sample])
