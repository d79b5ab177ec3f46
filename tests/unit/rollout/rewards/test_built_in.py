"""Tests of the built-in rewards."""

import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RewardSpec
from services.extras.math_verify import answer as math_reward
from services.extras.math_verify.answer import math_answer
from services.extras.reasoning_gym.reward import gym_answer
from services.rollout.calls.pool import CallPool
from services.rollout.data.sources import open_sources
from services.rollout.rewards.answers import exact_match
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.scorer import Scorer


def test_exact_match_ignores_white_space_and_on_demand_case() -> None:
    assert exact_match("", " 123 \n", "123", {}) == 1.0
    assert exact_match("", "1234", "123", {}) == 0.0
    assert exact_match("", "Yes", "yes", {}) == 0.0
    assert exact_match("", "Yes", "yes", {}, ignore_case=True) == 1.0
    assert [exact_match("", text, 72.0, {}) for text in ("72", "72.0", "7")] == [1.0, 1.0, 0.0]
    assert exact_match("", "72", "72.0", {}) == 0.0
    assert exact_match("", "72", b"72", {}) == 1.0
    with pytest.raises(ValueError, match="UTF-8"):
        exact_match("", "72", b"\xff", {})
    for missing in (None, math.nan):
        with pytest.raises(ValueError, match="needs an answer"):
            exact_match("", "x", missing, {})


@pytest.mark.parametrize("reward", [exact_match, math_answer])
@pytest.mark.parametrize("answer", [["1", "2"], {"value": "1"}])
def test_an_answer_that_no_response_equals_is_a_failure(reward: Any, answer: object) -> None:
    with pytest.raises(ValueError, match=r"data\.answer_column"):
        reward("", "1", answer, {})


def test_the_processes_of_rewards_that_compare_answers_do_not_import_the_specification() -> None:
    """Each replica and each check of a specification starts several of these processes."""
    code = "import sys, services.rollout.rewards.answers\nprint('pydantic' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>6 or 7</think>\n72", 1.0),
        ("6 or 7</think>72", 1.0),
        ("<think>\n\n</think>\n\n72", 1.0),
        ("<think>72</think>7", 0.0),
        ("<think>so it is \\boxed{72}", 0.0),
        ("<think>so it is 72", 0.0),
        ("<think>72</think>", 0.0),
        ("<think>1</think><think>72", 0.0),
    ],
)
def test_reasoning_is_no_answer(response: str, score: float) -> None:
    """An unfinished one has none."""
    assert math_answer("", response, "72", {}) == score
    assert exact_match("", response, "72", {}) == score


async def test_a_built_in_reward_knows_that_the_template_began_the_reasoning() -> None:
    unfinished = RewardInput(
        prompt="q", response="so it is 72", answer="72", row={}, opens_reasoning=True
    )
    async with CallPool(1) as pool:
        scorer = Scorer([RewardSpec(name="math_verify")], pool)
        for reward_input, score in (
            (unfinished, 0.0),
            (replace(unfinished, response="6 or 7</think>72"), 1.0),
            (replace(unfinished, opens_reasoning=False), 1.0),
        ):
            assert (await scorer.score(reward_input)).value == score


GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so 72", 1.0),
        ("... #### 72", 1.0),
        (r"thus $\boxed{72}$", 1.0),
        ("72.0", 1.0),
        ("24", 0.0),
        ("", 0.0),
        ("no idea", 0.0),
    ],
)
def test_gsm8k_answers_are_compared_by_value(response: str, score: float) -> None:
    assert math_answer("", response, GOLD, {}) == score


def test_latex_answers_are_compared_by_value() -> None:
    assert math_answer("", r"It is $\frac{2}{4}$.", r"$\frac{1}{2}$", {}) == 1.0
    assert math_answer("", "1,000", "#### 1000", {}) == 1.0


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_answers_in_the_styles_of_public_data_sets_score_1_and_wrong_ones_0(every: int) -> None:
    """335 answers in the styles of MATH-500, AIME, GSM8K and OlympiadBench, of which a commit tests 1/8."""
    rows = json.loads(Path(__file__).with_name("math_answers.json").read_text())
    misjudged = [
        (row["gold"], response, kind)
        for row in rows[::every]
        for kind, score in (("right", 1.0), ("wrong", 0.0))
        for response in row[kind]
        if math_answer("", response, row["gold"], {}) != score
    ]
    assert misjudged == []


def test_a_comparison_that_takes_too_long_is_a_time_out_not_a_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare_for_ever(*_: object) -> bool:
        while True:
            pass

    monkeypatch.setattr(math_reward, "_CPU_TIMEOUT_S", 0.2)
    monkeypatch.setattr(math_reward, "_same", compare_for_ever)
    with pytest.raises(TimeoutError):
        math_answer("", r"\boxed{35}", "35", {})


def test_the_time_limit_interrupts_regular_expressions() -> None:
    with pytest.raises(TimeoutError), math_reward._cpu_time_limit(0.1):
        re.search(r"(a|a)*b", "a" * 100)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


@pytest.mark.parametrize("space", [" " * 60_000, "\n" * 60_000, "\t \n" * 20_000])
@pytest.mark.parametrize(
    "form", [r"\boxed{%s72}", r"\boxed{72%s}", "#### 72%s.", "#### %s72", "The answer is%s 72"]
)
def test_white_space_is_no_part_of_an_answer_and_takes_no_time(form: str, space: str) -> None:
    assert math_answer("", form % space, GOLD, {}) == 1.0


def test_an_answer_longer_than_any_is_wrong_and_a_longer_gold_answer_rejected() -> None:
    assert math_answer("", r"\boxed{%s}" % ("7" * 2001), "7", {}) == 0.0
    with pytest.raises(ValueError, match="2000 characters"):
        math_answer("", "72", "x" * 2001, {})


def test_an_answer_without_an_expression_is_a_failure_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no expression"):
        math_answer("", "72", "####", {})


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        # the verifier needs these arguments
        ("word_ladder", {"min_word_length": 5, "max_word_length": 5}),
        ("rearc", {}),  # the verifier compares tuples, which JSON cannot represent
        ("arc_agi", {}),
    ],
)
def test_reasoning_gym_verifier_has_the_tasks_arguments(
    task: str, arguments: dict[str, int]
) -> None:
    train = {"source": "reasoning_gym", "path": task, "arguments": {"size": 1, **arguments}}
    spec = DataSpec.model_validate({"train": train, "prompt_column": "question"})
    row = json.loads(json.dumps(dict(open_sources(spec)["train"][0])))
    assert gym_answer("", row["answer"], row["answer"], row) == 1.0


def test_reasoning_gym_verifier_accepts_its_answer() -> None:
    row = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]
    assert gym_answer("", row["answer"], row["answer"], row) == 1.0
    assert gym_answer("", "nonsense", row["answer"], row) < 1.0
    tagged = f"<think> 1 + 1 </think> <answer> {row['answer']} </answer>"
    assert gym_answer("", tagged, row["answer"], row) == 1.0
    with pytest.raises(ValueError, match="source_dataset"):
        gym_answer("", "1", "1", {})


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        ("complex_arithmetic", ("nan", "nan + nanj", "inf")),
        ("coin_flip", ("0", "0.", "1")),
        ("game_of_life_halting", ("no", "0", "[]", "maybe")),
    ],
)
def test_reasoning_gym_gives_no_credit_for_what_only_its_verifier_accepts(
    task: str, wrong: tuple[str, ...]
) -> None:
    for row in reasoning_gym.create_dataset(task, size=4, seed=11):
        assert gym_answer("", row["answer"], row["answer"], row) == 1.0
        assert all(gym_answer("", text, row["answer"], row) < 1.0 for text in wrong)


@pytest.mark.parametrize("task", ["spell_backward", "gcd", "syllogism", "word_sorting", "codeio"])
def test_reasoning_gym_gives_no_part_of_the_credit_for_a_choice_or_a_denial(task: str) -> None:
    """Verifiers that count equal letters give 0.9999999999999998 for ``etatlep or 7``."""
    for row in reasoning_gym.create_dataset(task, size=2, seed=77):
        answer = row["answer"]
        assert gym_answer("", answer, answer, row) == 1.0
        for text in (f"{answer} or 7", f"not {answer}", f"<answer>{answer} or 7</answer>"):
            assert gym_answer("", text, answer, row) == 0.0
        for text in (f"{answer} {answer}", f"{answer}, I think"):
            assert gym_answer("", text, answer, row) < 0.999
