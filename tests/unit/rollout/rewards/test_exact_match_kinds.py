"""Tests of ``exact_match`` with 200 right and 200 wrong responses of ten kinds, made by rules."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest

from services.rollout.rewards.answers import exact_match

COUNT = 20
# Kind: for a number, the expected answer, right responses and wrong ones.
Kind = Callable[[int], tuple[Any, list[str], list[str]]]
WORDS = ("yes", "Oslo", "blue kite", "x + y", "東京", "café", "B", "<b>", "[1, 2]", "a\nb")


def texts(n: int) -> tuple[Any, list[str], list[str]]:
    word = f"{WORDS[n % len(WORDS)]} {n}"
    wrong = [word[:-1], f"{word}.", f"It is {word}", word.replace(" ", "  "), word.swapcase() + "!"]
    return word, [word, f" {word}", f"{word}\n", f"\n\t{word} \r\n"], [*wrong, ""]


def integers(n: int) -> tuple[Any, list[str], list[str]]:
    return n, [str(n), f" {n}\n"], [f"{n}.0", f"0{n}", f"{n + 1}", f"{n}0", f"-{n}", f"{n},", "nan"]


def numbers_of_tables(n: int) -> tuple[Any, list[str], list[str]]:
    """Tables convert a column of integers to floating point if a value is missing."""
    return float(n), [str(n), f"{n}.0", f" {n} "], [f"{n}.00", f"{n}.", f"{n}.5", f"{n}0", f"-{n}"]


def decimals(n: int) -> tuple[Any, list[str], list[str]]:
    return n + 0.25, [f"{n}.25", f"{n}.25\n"], [f"{n}.250", f"{n}", f"{n},25", f"{n}.26", f"{n}.2"]


def digits(n: int) -> tuple[Any, list[str], list[str]]:
    code = f"00{n}"
    return code, [code, f"{code} "], [str(n), f"0{n}", f"{code}.0", f"000{n}", f'"{code}"']


def truths(n: int) -> tuple[Any, list[str], list[str]]:
    answer = n % 2 == 0
    others = [str(not answer), str(int(answer)), f"{answer}!", "yes", ""]
    return answer, [str(answer), f"{answer}\n"], others


def octets(n: int) -> tuple[Any, list[str], list[str]]:
    word = f"{WORDS[n % len(WORDS)]}{n}"
    return word.encode(), [word, f" {word}"], [str(word.encode()), word[:-1], word * 2, ""]


def reasoned(n: int) -> tuple[Any, list[str], list[str]]:
    return (
        str(n),
        [f"<think>{n + 1}</think>{n}", f"<think>\n</think>\n\n{n}\n", f"so {n + 1}</think> {n}"],
        [
            f"<think>{n}</think>{n + 1}",
            f"<think>{n}",
            f"<think>{n}</think>",
            f"{n}<think>",
            f"{n}</think>",
            f"<think>{n + 1}</think><think>{n}",
        ],
    )


def decorated(n: int) -> tuple[Any, list[str], list[str]]:
    """Decorations are no part of the answer, and ``exact_match`` compares all of a response."""
    answer = f"${n}$" if n % 2 else f"**{n}**"
    wrong = [f"\\boxed{{{n}}}", f"#### {n}", f"`{n}`", f"<answer>{n}</answer>", str(n), f"({n})"]
    return answer, [answer, f"\n{answer}\n"], wrong


def lookalikes(n: int) -> tuple[Any, list[str], list[str]]:
    answer = f"a-{n}"
    others = [f"а-{n}", f"a–{n}", f"a−{n}", f"a -{n}", f"A-{n}", f"a\u200b-{n}", f"a-{n}\u200b"]  # noqa: RUF001
    return answer, [answer, f"\u00a0{answer}\u2003"], others


KINDS: list[Kind] = [
    *(texts, integers, numbers_of_tables, decimals, digits),
    *(truths, octets, reasoned, decorated, lookalikes),
]


def cases(kind: Kind) -> list[tuple[Any, str, float]]:
    """Returns twenty right responses and twenty wrong ones, each with its answer."""
    rows = [kind(n) for n in range(2, 2 + COUNT)]
    return [
        (answer, next(islice(cycle(responses), n, None)), score)
        for n, (answer, right, wrong) in enumerate(rows)
        for responses, score in ((right, 1.0), (wrong, 0.0))
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_only_the_text_of_the_answer_scores_1(kind: Kind) -> None:
    judged = cases(kind)
    assert len(judged) == 2 * COUNT
    assert [case for case in judged if exact_match("", case[1], case[0], {}) != case[2]] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_case_is_ignored_on_demand_and_nothing_else(kind: Kind) -> None:
    for answer, response, score in cases(kind):
        expected = score or float(
            any(
                response.strip().casefold() == right.strip().casefold()
                for n in range(2, 2 + COUNT)
                for of_answer, rights, _ in [kind(n)]
                if of_answer == answer
                for right in rights
            )
        )
        assert exact_match("", response, answer, {}, ignore_case=True) == expected
