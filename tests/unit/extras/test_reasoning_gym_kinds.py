"""Tests of ``reasoning_gym`` with 200 right and 200 wrong responses of ten tasks."""

import pytest
import reasoning_gym

from services.extras.reasoning_gym import reward
from services.extras.reasoning_gym.reward import gym_answer

COUNT = 20
TASKS = (
    *("basic_arithmetic", "leg_counting", "spell_backward", "number_sorting", "letter_counting"),
    *("gcd", "lcm", "prime_factorization", "fraction_simplification", "decimal_arithmetic"),
)


@pytest.mark.parametrize("task", TASKS)
def test_only_the_answer_of_a_row_scores_1(task: str) -> None:
    rows = list(reasoning_gym.create_dataset(task, size=COUNT, seed=7))
    for number, row in enumerate(rows):
        answer = row["answer"]
        forms = (f"{answer}", f"<answer>{answer}</answer>", f"<think>no</think>{answer}")
        assert gym_answer("", forms[number % len(forms)], answer, row) == 1.0, answer
        others = [other["answer"] for other in rows if other["answer"] != answer]
        wrong = (others[number % len(others)], "", "nan", f"{answer}{answer}", f"<think>{answer}")
        wrong += (f"{answer} or {others[0]}", f"not {answer}", "no answer at all")
        assert gym_answer("", wrong[number % len(wrong)], answer, row) < 1.0, answer


def test_a_verifier_that_fails_for_its_own_answer_is_a_failure() -> None:
    (row,) = reasoning_gym.create_dataset("prime_factorization", size=1, seed=7)
    assert gym_answer("", "no number", row["answer"], row) < 1.0
    with pytest.raises(ValueError, match="invalid literal"):
        gym_answer("", "no number", "broken", {**row, "answer": "broken"})


def test_a_ladder_may_contain_the_word_not() -> None:
    lengths = {"min_word_length": 3, "max_word_length": 3}
    (row,) = reasoning_gym.create_dataset("word_ladder", size=1, seed=7, **lengths)
    row["task"] = {"name": "word_ladder", "arguments": lengths}
    row["answer"] = "HOT,LOT,LIT,NIT"
    row["metadata"] |= {"start_word": "HOT", "end_word": "NIT"}
    assert gym_answer("", "HOT,NOT,NIT", row["answer"], row) == 1.0


@pytest.mark.parametrize("error", [TimeoutError, ImportError, MemoryError])
def test_an_error_of_the_machine_is_no_score(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def verify(answer: str | None, entry: object) -> float:
        if answer is not None:  # a task without one expected answer
            raise error
        return 0.0

    monkeypatch.setattr(reward, "_gym_verifier", lambda *_: verify)
    row = {"answer": None, "metadata": {"source_dataset": "rush_hour"}}
    with pytest.raises(error):
        gym_answer("", "F+1", None, row)


@pytest.mark.parametrize(
    "task",
    [
        *("sokoban", "quantum_lock", "kakurasu", "knights_knaves", "gsm_symbolic", "letter_jumble"),
        *("simple_integration", "intermediate_integration", "polynomial_equations", "survo"),
        *("time_intervals", "advanced_geometry", "word_sorting", "fraction_simplification"),
    ],
)
def test_text_beside_the_answer_that_a_verifier_ignores_gets_no_credit(task: str) -> None:
    rows = list(reasoning_gym.create_dataset(task, size=3, seed=5))
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        answer, another = str(row["answer"]), str(other["answer"])
        assert gym_answer("", answer, answer, row) == 1.0
        for wrong in (f"{answer}zq7", f"zq7{answer}", f"{answer} {'x' * 50}", f"{answer}{answer}"):
            assert gym_answer("", wrong, answer, row) < 1.0, wrong
        if another != answer:
            assert gym_answer("", f"{answer}, {another}", answer, row) < 1.0, answer


@pytest.mark.parametrize("task", ["gsm_symbolic", "coin_flip", "basic_arithmetic", "chain_sum"])
def test_a_number_with_another_sign_gets_no_credit(task: str) -> None:
    for row in reasoning_gym.create_dataset(task, size=3, seed=5):
        answer = str(row["answer"])
        assert gym_answer("", answer, answer, row) == 1.0
        opposite = answer.removeprefix("-") if answer.startswith("-") else f"-{answer}"
        for wrong in (opposite, f"${opposite}", f" {opposite}.", f"{answer}0e-9"):
            assert gym_answer("", wrong, answer, row) < 1.0, wrong
        assert gym_answer("", "0", answer, row) < 1.0


def test_another_spelling_of_a_right_answer_keeps_its_credit() -> None:
    (row,) = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=5)
    for text in (f"${row['answer']}", f"{row['answer']}.0", f"**{row['answer']}**"):
        assert gym_answer("", text, row["answer"], row) == 1.0, text
    (row,) = reasoning_gym.create_dataset("polynomial_equations", size=1, seed=5)
    assert gym_answer("", row["answer"].replace(", ", ","), row["answer"], row) == 1.0
