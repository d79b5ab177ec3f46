"""Rewards with several named terms."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.runspec.rollout import RewardSpec
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import MAX_TERMS, RewardInput, Score, weighted_score
from services.rollout.rewards.scorer import Scorer

JUDGED = RewardSpec.model_validate(
    {
        "name": "judge.py:judged",
        "weight": 2.0,
        "terms": {"format": {"weight": 0.1, "bounds": (0, 1)}, "length": {"weight": 0}},
    }
)


def test_terms_are_weighted_and_measured_before_weights() -> None:
    score = weighted_score([(JUDGED, {"format": 1.0, "length": 40.0, "right": 0.5})])
    assert score == Score(2 * (0.1 + 0.5), {"format": 1.0, "length": 40.0, "right": 0.5})


def test_numbers_are_terms_called_like_their_reward_and_no_name_is_lost() -> None:
    exact = RewardSpec(name="exact_match")
    remote = RewardSpec(name="https://judges.example/v1/exact-match")
    values = [(exact, 1.0), (exact, 0.0), (remote, 0.5), (JUDGED, {"format": 0, "length": 1})]
    assert weighted_score(values).terms == {
        "exact_match": 1.0,
        "exact_match-2": 0.0,
        "exact_match-3": 0.5,
        "format": 0.0,
        "length": 1.0,
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"format": 2.0, "length": 0}, "judge.py:judged: format'"),
        ({"format": float("nan"), "length": 0}, "finite number"),
        ({"format": float("-inf"), "length": 0}, "finite number"),
        ({"format": 1.0, "length": 0, "right": 1e39}, "finite number"),  # infinite in float32
        ({"format": "good", "length": 0}, "finite number"),
        ({"format": 1.0}, "length"),
        ({}, "format, length"),
        ({"format": 1.0, "length": 0, "a b": 1}, "'a b'"),
        ({"format": 1.0, "length": 0, 3: 1}, "3"),
        ({f"t{number}": 1.0 for number in range(MAX_TERMS + 1)}, "65 terms"),
        ({"format": 1.0, "length": 0, "right": 1e308, "more": 1e308}, "finite number"),
    ],
)
def test_wrong_terms_fail_the_reward(value: Any, message: str) -> None:
    with pytest.raises(CallError, match=message) as caught:
        weighted_score([(JUDGED, value)])
    assert caught.value.kind == "invalid_value"


async def test_a_reward_sees_the_whole_episode_if_it_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "seeing.py"
    file.write_text(
        "def seen(prompt, response, answer, row, *, episode):\n"
        "    return {'turns': len(episode['messages'])}\n"
        "def blind(prompt, response, answer, row):\n"
        "    return 1\n"
    )
    specs = [
        RewardSpec(name=f"{file}:seen", sees_episode=True),
        RewardSpec(name=f"{file}:blind"),
    ]
    reward_input = RewardInput(
        prompt="p", response="r", answer=None, row={}, episode=lambda: {"messages": [1, 2, 3]}
    )
    async with CallPool(1) as pool:
        assert await Scorer(specs, pool).score(reward_input) == Score(
            4.0, {"turns": 3.0, "blind": 1.0}
        )


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("72", "72", 1.0),
        ("72", "7", 0.0),
        (np.float32(72), "72", 1.0),  # as a process of the pool receives it: a number of JSON
        (np.int64(72), "72", 1.0),
        (b"72", "72", 1.0),
    ],
)
async def test_exact_match_starts_no_process(answer: Any, response: str, value: float) -> None:
    async with CallPool(0) as pool:  # every call would wait
        scorer = Scorer([RewardSpec(name="exact_match")], pool)
        async with asyncio.timeout(10):
            await scorer.check()
            score = await scorer.score(
                RewardInput(prompt="p", response=response, answer=answer, row={})
            )
    assert score == Score(value, {"exact_match": value})


@pytest.mark.parametrize(
    ("answer", "arguments", "message"),
    [
        (None, {}, "ValueError: exact_match needs an answer"),
        ({"value": "1"}, {}, "data.answer_column"),
        (np.array([1, 2]), {}, "data.answer_column"),
        ("1", {"strict": True}, "unexpected keyword argument 'strict'"),
    ],
)
async def test_an_answer_that_cannot_be_compared_fails_the_reward(
    answer: Any, arguments: dict[str, Any], message: str
) -> None:
    reward_input = RewardInput(prompt="p", response="1", answer=answer, row={})
    async with CallPool(0) as pool:
        with pytest.raises(CallError, match=message) as caught:
            await Scorer([RewardSpec(name="exact_match", arguments=arguments)], pool).score(
                reward_input
            )
    assert caught.value.kind == "exception"
