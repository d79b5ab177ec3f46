"""Rewards that compare the responses of a group, all at once or in pairs."""

import time
from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.rollout import RewardSpec
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.scorer import Comparison, Scorer
from tests.unit.rollout.sampling.test_sampler import assignment, sampling

REWARDS = """
import time

def rank(prompt, responses, answer, row):
    order = sorted(range(len(responses)), key=lambda i: len(responses[i]))
    return [{"rank": order.index(i)} for i in range(len(responses))]

def longer(prompt, first, second, answer, row):
    return 0.5 if len(first) == len(second) else float(len(first) > len(second))

def turns(prompt, responses, answer, row, *, episodes):
    return [len(episode["messages"]) for episode in episodes]

def short(prompt, responses, answer, row): return [1.0]
def mapped(prompt, responses, answer, row): return {"a": 1.0}
def holes(prompt, responses, answer, row): return [float("nan")] * len(responses)
def sure(prompt, first, second, answer, row): return 2.0
def raising(prompt, responses, answer, row): raise KeyError("no luck")
def hanging(prompt, responses, answer, row): time.sleep(100)
def one(prompt, response, answer, row): return 1.0
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def given(*responses: str) -> list[RewardInput]:
    return [
        RewardInput(
            prompt="p",
            response=response,
            answer=None,
            row={},
            episode=lambda: {"messages": ["one", "two"]},
        )
        for response in responses
    ]


async def scores(name: str, *responses: str, **changes: Any) -> list[Any]:
    async with CallPool(2) as pool:
        comparison = Comparison([RewardSpec(name=name, **changes)], pool)
        return await comparison.score(given(*responses))


async def test_a_function_ranks_the_responses_of_a_group(rewards: str) -> None:
    group_scores = await scores(f"{rewards}:rank", "aa", "a", "aaa", sees="group", weight=0.5)
    assert [score.value for score in group_scores] == [0.5, 0.0, 1.0]
    assert [score.terms for score in group_scores] == [{"rank": 1.0}, {"rank": 0.0}, {"rank": 2.0}]


async def test_a_response_is_worth_its_wins_over_the_others(rewards: str) -> None:
    group_scores = await scores(f"{rewards}:longer", "aa", "a", "aaa", "bb", sees="pairs")
    assert [score.value for score in group_scores] == pytest.approx([0.5, 0.0, 1.0, 0.5])
    (alone,) = await scores(f"{rewards}:longer", "aa", sees="pairs")
    assert alone.value == 0.5


async def test_a_comparison_may_see_whole_episodes(rewards: str) -> None:
    group_scores = await scores(f"{rewards}:turns", "a", "b", sees="group", sees_episode=True)
    assert [score.value for score in group_scores] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("short", {}, "invalid_value", r"short.*list of 2 numbers.*\[1.0\]"),
        ("mapped", {}, "invalid_value", "mapped.*list of 2 numbers"),
        ("holes", {}, "invalid_value", "holes.*finite number"),
        ("sure", {"sees": "pairs"}, "invalid_value", r"sure of a pair.*within \[0.0, 1.0\]"),
        ("raising", {}, "exception", "raising.*KeyError"),
        ("hanging", {"timeout_s": 0.3}, "timeout", "hanging.*longer than 0.3 s"),
    ],
)
async def test_a_wrong_comparison_is_named_and_never_hangs(
    rewards: str, name: str, changes: dict[str, Any], kind: str, message: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(CallError, match=message) as caught:
        await scores(f"{rewards}:{name}", "a", "b", **({"sees": "group"} | changes))
    assert caught.value.kind == kind
    assert time.monotonic() - begin < 30


async def test_a_score_is_the_sum_of_response_and_comparison_rewards(
    rewards: str,
) -> None:
    specs = [
        RewardSpec(name=f"{rewards}:one"),
        RewardSpec(name=f"{rewards}:longer", sees="pairs", weight=2.0),
    ]
    async with CallPool(2) as pool:
        scorer = Scorer(specs, pool)
        async with sampling(scorer, comparison=scorer.comparison()) as (sampler, outcome, _):
            sampler.start([assignment("g0")])
            await outcome.wait_for(1)
    samples = outcome.published["g0"]
    assert sum(sample.score.value for sample in samples) == pytest.approx(3 * 1.0 + 3 * 2.0 * 0.5)
    assert all(sample.score.terms.keys() == {"one", "longer"} for sample in samples)


@pytest.mark.parametrize("policy", ["mask", "regenerate"])
async def test_a_comparison_that_fails_fails_its_group_by_name(rewards: str, policy: str) -> None:
    specs = [RewardSpec(name=f"{rewards}:raising", sees="group")]
    async with CallPool(2) as pool:
        scorer = Scorer(specs, pool)
        async with sampling(
            scorer, comparison=scorer.comparison(), on_reward_failure=policy, max_attempts=2
        ) as (sampler, outcome, _):
            sampler.start([assignment("g0")])
            await outcome.wait_for(1)
    if policy == "mask":
        assert {sample.finish_reason for sample in outcome.published["g0"]} == {"failed"}
    else:
        assert outcome.failed["g0"].reason == "reward_exception"
        assert outcome.failed["g0"].retryable
