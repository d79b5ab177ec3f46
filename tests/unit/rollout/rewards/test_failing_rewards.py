"""Tests that failed rewards produce no score, and that no group waits beyond the deadline."""

import time
from pathlib import Path

import pytest

from services.common.runspec.rollout import RewardSpec
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling.sample import sample_fields
from tests.helpers.columns import rows_of
from tests.unit.rollout.sampling.test_sampler import assignment, sampling

REWARDS = """
import os, random, time
from pathlib import Path

def earned(response):
    return 1.0 if sum(response.encode()) % 2 else 0.25

def failing(prompt, response, answer, row):
    way = random.random()
    if way < 0.1:
        raise ConnectionError("down")
    if way < 0.15:
        return float("nan")
    if way < 0.18:
        return 7.0
    if way < 0.2:
        os._exit(1)
    return earned(response)

def sleeping(prompt, response, answer, row):
    try:
        Path(__file__ + ".asleep").touch(exist_ok=False)
    except FileExistsError:
        return earned(response)
    time.sleep(1000)
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def earned(response: str) -> float:
    return 1.0 if sum(response.encode()) % 2 else 0.25


@pytest.mark.parametrize("policy", ["mask", "regenerate"])
async def test_one_reward_in_five_fails_and_no_score_is_unearned(rewards: str, policy: str) -> None:
    spec = RewardSpec(name=f"{rewards}:failing", bounds=(0, 1))
    async with (
        CallPool(2) as pool,
        sampling(Scorer([spec], pool), on_reward_failure=policy, max_attempts=10) as (
            sampler,
            outcome,
            _,
        ),
    ):
        decode = sampler._services.tokenizer.decode
        sampler.start([assignment(f"g{index}", index % 2) for index in range(12)])
        await outcome.wait_for(12)
    assert not outcome.failed
    samples = [sample for group in outcome.published.values() for sample in group]
    scored = [sample for sample in samples if sample.finish_reason != "failed"]
    assert all(sample.score.value == earned(decode(sample.response_ids)) > 0 for sample in scored)
    masks = rows_of(sample_fields(samples)["response_mask"])
    assert [bool(mask.any()) for mask in masks] == [s.finish_reason != "failed" for s in samples]
    assert (len(scored) == len(samples)) == (policy == "regenerate")


async def test_a_reward_that_sleeps_for_ever_costs_no_more_than_its_deadline(rewards: str) -> None:
    spec = RewardSpec(name=f"{rewards}:sleeping", timeout_s=0.5)
    async with (
        CallPool(2) as pool,
        sampling(Scorer([spec], pool), on_reward_failure="regenerate") as (sampler, outcome, _),
    ):
        await pool.check(spec.name)
        began = time.monotonic()
        sampler.start([assignment(f"g{index}", index % 2) for index in range(6)])
        await outcome.wait_for(6)
        seconds = time.monotonic() - began
    assert len(outcome.published) == 6
    # The bound includes the start of another process, but no second wait, and is far below the sleep.
    assert seconds < 30


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(10**400, id="huge"),
        pytest.param(-(10**400), id="negative"),
        # Python refuses to convert this integer to decimal digits.
        pytest.param(10**5000, id="unwritable"),
        *(1e308, float("inf"), "1", None, [1.0], {"score": "1"}),
    ],
)
async def test_only_finite_numbers_are_scores(value: object) -> None:
    class Judge:
        async def score(self, reward_input: RewardInput, **_: object) -> object:
            return value

    spec = RewardSpec(name="http://judge", weight=10.0)
    scorer = Scorer([spec], None, {"http://judge": Judge()})  # type: ignore[arg-type,dict-item]
    reward_input = RewardInput(prompt="", response="", answer=None, row={})
    with pytest.raises(CallError, match="must return a finite number") as caught:
        await scorer.score(reward_input)
    assert caught.value.kind == "invalid_value"
    assert len(caught.value.message) < 400


async def test_a_huge_integer_of_a_python_reward_does_not_crash_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text("def huge(*arguments):\n    return 10 ** 400\n")
    async with CallPool(1) as pool:
        scorer = Scorer([RewardSpec(name=f"{tmp_path}/huge.py:huge", bounds=(0, 1))], pool)
        with pytest.raises(CallError, match="an integer of 1329 bits"):
            await scorer.score(RewardInput(prompt="", response="", answer=None, row={}))
