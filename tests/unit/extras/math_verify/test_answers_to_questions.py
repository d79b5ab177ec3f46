"""Tests of ``math_verify`` with 2,244 right and 2,877 wrong answers, some of which depend on the question."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from services.extras.math_verify.answer import math_answer

ROWS: list[dict[str, Any]] = [
    row
    for name in (
        "answers_to_questions.json",
        "answers_beside_words.json",
        "answers_of_parts.json",
        "answers_of_ten_kinds.json",
    )
    for row in json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
]
KINDS = {kind: [*rows] for kind, rows in groupby(ROWS, key=lambda row: str(row["kind"]))}


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_score_1_and_wrong_ones_0(kind: str) -> None:
    misjudged = [
        (row["prompt"], row["answer"], text, score)
        for row in KINDS[kind]
        for score, texts in ((1.0, row["right"]), (0.0, row["wrong"]))
        for text in texts
        if math_answer(row["prompt"], text, row["answer"], {}) != score
    ]
    assert misjudged == []


@pytest.mark.parametrize(
    ("question", "answer", "response", "score"),
    [
        ("How many apples are left?", "72", "72%", 0.0),
        ("What per cent of the apples is left?", "72", "72%", 1.0),
        ("What is 25\\% of 288?", "72", "\\boxed{72\\%}", 0.0),
        ("What per cent of the apples is left?", "25\\%", "0.25%", 0.0),
        ("What is the probability?", "\\frac12", "1:2", 0.0),
        ("What is the ratio of a to b?", "\\frac12", "1:2", 1.0),
        ("What is the ratio of a to b?", "\\frac12", "2:1", 0.0),
        ("How many apples has Ann?", "72", "\\boxed{72 \\text{ more}}", 0.0),
        ("How many more apples has Ann?", "72", "\\boxed{72 \\text{ more}}", 1.0),
        ("How many more apples has Ann?", "72", "\\boxed{72 \\text{ fewer}}", 0.0),
        ("What is the difference?", "72", "Ann has 72 fewer apples.", 1.0),
        ("Solve for x.", "3", "\\boxed{2x = 3}", 0.0),
        ("Compute how many gallons fit. How much will it cost to fill it?", "826", "$826", 1.0),
        ("Compute how many gallons fit.", "826", "$826", 0.0),
        ("What is 2x?", "3", "\\boxed{2x = 3}", 1.0),
    ],
)
def test_the_question_decides_what_an_answer_means(
    question: str, answer: str, response: str, score: float
) -> None:
    assert math_answer(question, response, answer, {}) == score


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("5\\text{ kg m/s}^2", "5 N", 1.0),
        ("5\\text{ kg m/s}^2", "5 J", 0.0),
        ("12\\text{ J}", "12 \\text{ N m}", 1.0),
        ("12\\text{ kW}", "12000 J/s", 1.0),
        ("\\sin 30^\\circ", "\\boxed{\\cos 60^\\circ}", 1.0),
        ("\\sin 30^\\circ", "\\boxed{\\cos 30^\\circ}", 0.0),
        ("11,\\! 111,\\! 111,\\! 100", "\\boxed{11111111100}", 1.0),
    ],
)
def test_derived_units_angles_of_functions_and_spaced_thousands(
    answer: str, response: str, score: float
) -> None:
    assert math_answer("", response, answer, {}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("The answer is " + "1" * 8000, "35", 0.0),
        ("\\boxed{" + "1" * 5000 + "}", "35", 0.0),
        ("\\boxed{\\frac{1}{" + "1" * 5000 + "}}", "35", 0.0),
        ("7 \\times 10^{" + "1" * 5000 + "}", "35", 0.0),
        ("\\boxed{7 \\times 10^{99999999}}", "35", 0.0),
        ("\\boxed{1e999999999}", "35", 0.0),
        ("\u00b2" * 8000, "35", 0.0),
        ("The answer is " + "1" * 5000 + "\nDone.", "35", 0.0),
        ("\\boxed{0." + "3" * 1500 + "4}", "35", 0.0),
        ("\\$" + "1" * 5000 + " million\n\\boxed{35}", "35", 1.0),
        ("It has these digits: " + "1" * 5000 + "\nThe answer is 35.", "35", 1.0),
        ("$7^{10000000} \\equiv 35$", "35", 1.0),
        ("\\boxed{7^{10000000}}", "7^{10000000}", 1.0),
        ("7 \\times 10^{40}", "7 \\times 10^{40}", 1.0),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else value,
)
def test_numbers_too_large_to_compute_are_wrong_answers(
    response: str, answer: str, score: float
) -> None:
    question = "How many pages does Tom read if he reads 5 pages per day for 7 days?"
    assert math_answer(question, response, answer, {}) == score


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Find the value of a + b if a = 3 and b = 4.", "a + b"),
        ("Find the value of a if a + b = 10 and b = 3.", "a"),
        ("What is the value of $a$ such that $2a - b = 10$ and $b = 4$?", "a"),
        ("Let b = 3 and a = 10 - b. What is the value of a?", "a"),
    ],
)
def test_a_variable_a_is_no_article(question: str, name: str) -> None:
    assert math_answer(question, f"{name} = 7", "7", {}) == 1.0
    assert math_answer(question, "b = 7", "7", {}) == 0.0


def test_an_article_begins_no_name() -> None:
    question = "A square has side s = 7. Find the value of a side of its copy."
    assert math_answer(question, "s = 7", "7", {}) == 1.0
