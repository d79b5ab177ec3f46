"""Tests in virtual time that a response of two hours survives kills and new weights and has no age limit."""

import asyncio

from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RolloutSpec
from services.extras.fake_engine.engine import FakeEngine
from services.extras.fake_engine.virtual_time import VirtualTimeLoop
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import PromptStore
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.sampler import EpisodeWatch, GroupSampler
from services.rollout.workflows.base import SingleTurn
from tests.helpers.engines import running
from tests.unit.rollout.sampling.test_sampler import (
    ROWS,
    MemoryCache,
    Outcome,
    ScoreBy,
    assignment,
    tokenizer,
)

TOKEN_S = 0.1
NUM_TOKENS = 72_000
NUM_KILLS, NUM_VERSIONS = 3, 20


class TwoHours:
    """Response lengths that take two hours each."""

    def length(self, seed: int) -> int:
        return NUM_TOKENS


def sampler_with(engine: FakeEngine, outcome: Outcome, cache: MemoryCache) -> GroupSampler:
    data = DataSpec(train={"source": "jsonl", "path": "rows"}, max_prompt_tokens=20)  # type: ignore[arg-type]
    spec = RolloutSpec(
        rewards=[{"name": "unused"}],  # type: ignore[arg-type]  # pydantic converts
        max_response_tokens=NUM_TOKENS,
        partial_rollout=True,
    )
    services = GroupServices(
        engine=engine,
        tokenizer=tokenizer(),
        workflow=SingleTurn(),
        reward=ScoreBy(lambda _: 1.0),
        calls=CallPool(1),
    )
    return GroupSampler(
        PromptStore(data, {"train": ROWS}, tokenizer()),
        services,
        spec,
        publisher=outcome,
        cache=cache,
        report_failures=outcome.report,
    )


async def generate_through_kills() -> tuple[Outcome, float]:
    """Generates one group while its rollout dies three times and new weights arrive every six minutes."""
    outcome, cache, watch = Outcome(), MemoryCache(), EpisodeWatch(600.0)
    now = asyncio.get_running_loop().time
    version = 0
    for attempt in range(1, NUM_KILLS + 2):
        engine = FakeEngine(max_running=8, step_seconds=lambda _: TOKEN_S, lengths=TwoHours())
        async with running(engine), sampler_with(engine, outcome, cache) as sampler:
            await engine.adopt_weights(version, {})
            sampler.start(
                [assignment("g1", seeds=(7, 8), temperatures=(1.0, 1.0), attempt=attempt)]
            )
            for _ in range(NUM_VERSIONS // (NUM_KILLS + 1)):
                await asyncio.sleep(NUM_TOKENS * TOKEN_S / NUM_VERSIONS)
                version += 1
                await engine.adopt_weights(version, {})
                await sampler.checkpoint()
                await sampler.stop_stalled(watch, now=now())
            if attempt > NUM_KILLS:
                await outcome.wait_for(1)
    return outcome, now()


def test_a_response_of_two_hours_loses_nothing_through_kills_and_new_weights() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        outcome, seconds = runner.run(generate_through_kills())
    assert not outcome.failed
    assert 7200 <= seconds < 7210
    for sample, seed in zip(outcome.published["g1"], (7, 8), strict=True):
        expected = [(2 + seed * 31 + position) % 256 for position in range(NUM_TOKENS - 1)]
        assert list(sample.response_ids) == [*expected, 1]
        assert [version for version, _ in sample.version_runs] == list(range(NUM_VERSIONS))
        logprobs = [value for turn in sample.turns for value in turn.logprobs]
        claimed = [v for v, count in sample.version_runs for _ in range(count)]
        assert max(abs(p + 1 + v / 1000) for p, v in zip(logprobs, claimed, strict=True)) < 1e-6
