"""Rewards per turn and per token: positions, and invalid values."""

from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.rollout import RewardSpec
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling.progress_cache import (
    MemberProgress,
    decode_progress,
    encode_progress,
)
from services.rollout.sampling.sample import placed_rewards, sample_fields
from services.rollout.workflows.base import Episode
from services.rollout.workflows.turns import Turn, observed, trained_once
from tests.helpers.columns import rows_of
from tests.unit.rollout.sampling.test_sampler import assignment, sampling

REWARDS = """
def turns(prompt, response, answer, row): return [1.0, -2.0]
def tokens(prompt, response, answer, row): return [0.5, 0.0, 0.0, 0.25, 0.0]
def whole(prompt, response, answer, row): return 3.0
def short(prompt, response, answer, row): return [1.0]
def number(prompt, response, answer, row): return 1.0
def holes(prompt, response, answer, row): return [float("nan"), 0.0]
def seen(prompt, response, answer, row, *, episode):
    return [float(len(m["token_ids"])) for m in episode["messages"] if m["role"] == "assistant"]
"""
GIVEN = RewardInput(prompt="p", response="r", answer=None, row={}, turn_lengths=(3, 2))


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


async def score(*specs: RewardSpec) -> Score:
    async with CallPool(2) as pool:
        return await Scorer(specs, pool).score(GIVEN)


async def test_turns_and_tokens_are_credited_where_they_are_and_summed_elsewhere(
    rewards: str,
) -> None:
    total = await score(
        RewardSpec(name=f"{rewards}:turns", per="turn", weight=0.5),
        RewardSpec(name=f"{rewards}:tokens", per="token"),
        RewardSpec(name=f"{rewards}:whole"),
    )
    assert total.tokens == (0.5, 0.0, 0.5, 0.25, -1.0)
    assert total.value == pytest.approx(0.5 * -1.0 + 0.75 + 3.0)
    assert total.terms == {"turns": -1.0, "tokens": 0.75, "whole": 3.0}
    assert (await score(RewardSpec(name=f"{rewards}:whole"))).tokens == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"short.*2 numbers.*\[1.0\]"),
        ("number", "number.*2 numbers"),
        ("holes", "holes of a turn"),
    ],
)
async def test_a_list_that_does_not_fit_the_turns_is_rejected_by_name(
    rewards: str, name: str, message: str
) -> None:
    with pytest.raises(CallError, match=message) as caught:
        await score(RewardSpec(name=f"{rewards}:{name}", per="turn"))
    assert caught.value.kind == "invalid_value"


def turn(*ids: int) -> Turn:
    return Turn(
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        version_runs=((0, len(ids)),),
        finish_reason="stop",
    )


def test_rewards_follow_a_turn_to_the_conversation_that_trains_it() -> None:
    prompt, first = observed((1, 2)), turn(3, 4)
    other = (prompt, first, observed((5,)), turn(6))
    judged = (prompt, first, observed((7,)), turn(8, 9))
    placed = placed_rewards((1.0, 2.0, 3.0, 4.0), judged, trained_once([other, judged]))
    #                 3    4    5    6    1    2    3    4    7    8    9
    assert placed == (1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0)


def test_a_score_that_waits_in_the_cache_keeps_its_tokens() -> None:
    member = MemberProgress(
        num_failed_scores=0, turns=(turn(1, 2),), score=Score(1.5, {"a": 1.5}, (0.5, 1.0))
    )
    assert decode_progress(encode_progress(member)) == member


class Twice:
    """Workflow with two sampled turns and an observation between them."""

    async def run(self, episode: Episode) -> None:
        async def observation() -> str:
            return "ab"

        await episode.generate(max_tokens=2)
        await episode.observe(observation)
        await episode.generate(max_tokens=1)


async def test_a_sample_has_a_reward_for_each_token_of_its_response(rewards: str) -> None:
    spec = RewardSpec(name=f"{rewards}:seen", per="turn", sees_episode=True)
    async with CallPool(2) as pool:
        setting: Any = sampling(Scorer([spec], pool), workflow=Twice(), max_response_tokens=8)
        async with setting as (sampler, outcome, _):
            sampler.start([assignment("g0")])
            await outcome.wait_for(1)
    samples = outcome.published["g0"]
    rewards = rows_of(sample_fields(samples, has_token_rewards=True)["token_rewards"])
    for row, sample in enumerate(samples):
        lengths = [len(turn.token_ids) for turn in sample.turns]
        expected = [0.0] * (lengths[0] - 1) + [float(lengths[0])]
        expected += [0.0] * lengths[1] + [0.0] * (lengths[2] - 1) + [float(lengths[2])]
        assert rewards[row].tolist() == expected
        assert sample.score.value == lengths[0] + lengths[2]
    assert "token_rewards" not in sample_fields(samples)
