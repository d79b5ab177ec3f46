"""Tests of ``math_verify`` with answers of further kinds: units, words, signs, currencies, dates, ranges."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from services.extras.math_verify.answer import math_answer

ROWS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("answers_of_kinds.json").read_text(encoding="utf-8")
)
KINDS = {kind: [*rows] for kind, rows in groupby(ROWS, key=lambda row: str(row["kind"]))}
SENTENCES = ("%s", "\\boxed{%s}", "The answer is %s", "By counting.\n#### %s")
"""A text that is a response already is not put into another one."""


def is_response(text: str) -> bool:
    return "\\boxed" in text or text.endswith((".", "?")) or " " in text.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_score_1_and_wrong_ones_0(kind: str) -> None:
    misjudged = []
    for row in KINDS[kind]:
        for score, texts in ((1.0, row["right"]), (0.0, row["wrong"])):
            for number, text in enumerate(texts):
                response = text if is_response(text) else SENTENCES[number % 4] % text
                if math_answer("", response, row["answer"], {}) != score:
                    misjudged.append((row["answer"], response, score))
    assert misjudged == []


@pytest.mark.parametrize("text", ["72!!", "(72!)!", "((9!)!)!"])
def test_a_factorial_of_a_factorial_takes_no_time(text: str) -> None:
    assert math_answer("", f"\\boxed{{{text}}}", "72", {}) == 0.0


def test_quantities_are_converted_to_the_unit_of_the_answer() -> None:
    assert math_answer("", "It is 3000 grams.", "3 \\text{ kg}", {}) == 1.0
    assert math_answer("", "So she needs 90 minutes", "1.5 hours", {}) == 1.0
    assert math_answer("", "So she needs 90 seconds", "1.5 hours", {}) == 0.0
    assert math_answer("", "The angle is \\frac{\\pi}{4} radians.", "45 degrees", {}) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        *(
            "Half of 144 is 72.",
            "Twice 36 equals 72.",
            "36 doubled is 72.",
            "She doubled 36 to get 72.",
        ),
        *(
            "The square root of 5184 is 72",
            "He did not stop at 70; he got 72",
            "In total, 72 of them.",
        ),
    ],
)
def test_words_that_change_another_number_cost_no_credit(response: str) -> None:
    assert math_answer("", response, "#### 72", {}) == 1.0


@pytest.mark.parametrize(
    "response",
    ["72 is wrong", "It isn't 72", "It can't be 72.", "So it is half of 72", "72 is not it"],
)
def test_a_denied_answer_gets_no_credit(response: str) -> None:
    assert math_answer("", response, "#### 72", {}) == 0.0
