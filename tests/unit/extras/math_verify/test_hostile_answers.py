"""Tests that responses which try to be expensive to judge are wrong answers and no failures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.extras.math_verify import answer as math_reward
from services.extras.math_verify.answer import math_answer
from tests.helpers.hostile_answers import ANSWERS, FORMS, QUESTIONS, SIGNS, responses

QUESTION = "How many pages does Tom read if he reads 5 pages per day for 7 days?"


@pytest.fixture(autouse=True)
def short_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_reward, "_CPU_TIMEOUT_S", 2.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        *(
            sign * 8000
            for sign in ("(", "{", "[", "\u00bd", "[1,", "\\frac{", "<answer>", "\\boxed{")
        ),
        *("9^{9^{9^9}}", "99999999!", "((10!)!)!", "\\binom{99999999}{4999999}"),
        *(
            "(1+\\frac{1}{10^{9}})^{10^{9}}",
            "(x+y+z)^{500}",
            "|1 cent " * 30,
            "\\sum_{n=1}^{999999999} n",
            *("(n+999999)!", "e^{(x+y+z)^{43}}"),
        ),
        *(
            "\\sin\\cos\\tan" * 3 + " 7",
            "\\sin(" * 8 + "7" + ")" * 8,
            "sin " * 11 + "7",
            "ln cos " * 6 + "7",
        ),
        "a_x_b_y_c_z_" * 5 + "7",
        "4/4 9/4 2/6 1/3 2/2 8/2 5/5 5/3 3/7 5/3 3/4 " * 4,
        "\\frac{x^3-1}{x^4-x+1}<\\frac{x}{x^2-2}",
    ],
    ids=lambda text: text[:12],
)
def test_a_response_that_is_too_long_or_too_large_scores_0(form: str, text: str) -> None:
    response = form.replace("%s", text)
    assert math_answer(QUESTION, response, "37", {}) == 0.0
    assert math_answer("", response, "(1,2)", {}) == 0.0


def test_no_random_hostile_response_fails() -> None:
    scores = {
        math_answer(question, text, answer, {}) for question, answer, text in responses(200, 7)
    }
    assert scores <= {0.0, 1.0}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(QUESTIONS),
    st.sampled_from(ANSWERS),
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.sampled_from(SIGNS), st.sampled_from((1, 2, 40, 4000))), max_size=6),
)
def test_no_sequence_of_repeated_signs_fails(
    question: str, answer: str, form: str, runs: list[tuple[str, int]]
) -> None:
    text = "".join(sign * count for sign, count in runs)
    assert math_answer(question, form.replace("%s", text), answer, {}) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("2^{2^{2024}}", "2^{(2^{2024})}", "2^{(2^{2023})}"),
        ("2024!", "2024\\cdot 2023!", "2023!"),
        ("10^{2024}", "10\\cdot 10^{2023}", "10^{2023}"),
        ("\\frac{1}{3}", "\\int_0^1 x^2 dx = \\frac{1}{3}", "\\int_0^1 x^2 dx"),
        ("0", "\\lim_{x\\to 0} x = 0", "\\lim_{x\\to 0} x"),
        ("(x+1)^{100}", "(1+x)^{100}", "(1+x)^{99}"),
        ("x^{1000}+y^{1000}", "y^{1000}+x^{1000}", "(x+y)^{1000}"),
        ("1 < x < 3", "(1, 3)", "(1, 3]"),
        ("x^2+2x+1", "(x+1)^2", "(x-1)^2"),
        ("\\sqrt{x^2}", "x", "2x"),
    ],
)
def test_large_numbers_and_expressions_are_compared_without_computing_them(
    answer: str, right: str, wrong: str
) -> None:
    assert math_answer("", f"\\boxed{{{right}}}", answer, {}) == 1.0
    assert math_answer("", f"\\boxed{{{wrong}}}", answer, {}) == 0.0


def test_the_end_of_a_long_response_is_its_answer() -> None:
    prose = "He adds the numbers (see above) and checks them again. " * 400
    assert math_answer(QUESTION, f"{prose}The answer is 35.", "35", {}) == 1.0
    assert math_answer(QUESTION, f"{prose}\n\\boxed{{35}}\n{prose}", "35", {}) == 1.0
    assert math_answer(QUESTION, f"{prose}The answer is 36.", "35", {}) == 0.0
