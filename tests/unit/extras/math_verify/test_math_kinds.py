"""Tests of ``math_verify`` with right and wrong answers of twelve kinds, made by rules from a number."""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from services.extras.math_verify.answer import math_answer

COUNT = 20
# Kind: for a number, the expected answer, right answers and wrong ones.
Kind = Callable[[int], tuple[str, list[str], list[str]]]


def tiny(n: int) -> tuple[str, list[str], list[str]]:
    base = f"{n}.5\\times 10^{{-{n + 7}}}"
    return (
        base,
        [f"{n}.50\\times 10^{{-{n + 7}}}", f"{n}.5e-{n + 7}", f"{n}5\\cdot 10^{{-{n + 8}}}"],
        [f"{n}.5\\times 10^{{-{n + 8}}}", f"{n}.6\\times 10^{{-{n + 7}}}", f"-{base}", "0"],
    )


def decimals(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"0.000000{n}",
        [f"0.000000{n}0", f".000000{n}", f"\\frac{{{n}}}{{{10 ** (6 + len(str(n)))}}}"],
        [f"0.000000{n + 1}", f"0.0000000{n}", "0.0", f"1.000000{n}"],
    )


def long_decimals(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"{n}.00000012345678901234",
        [f"{n}.000000123456789012340"],
        [f"{n}.00000012345678901235", f"{n}.0000001", f"{n}"],
    )


def huge(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"10^{{{n + 16}}}+{n}",
        [str(10 ** (n + 16) + n), f"{n}+10^{{{n + 16}}}"],
        [str(10 ** (n + 16)), f"10^{{{n + 16}}}+{n + 1}", f"10^{{{n + 17}}}+{n}"],
    )


def quotients(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"\\frac{{{n}^{{90}}}}{{{n + 1}^{{91}}}}",
        [f"{n}^{{90}}/{n + 1}^{{91}}", f"\\frac{{{n}^{{91}}}}{{{n}\\cdot {n + 1}^{{91}}}}"],
        [
            f"\\frac{{{n + 2}^{{90}}}}{{{n + 1}^{{91}}}}",
            f"\\frac{{{n}^{{90}}+1}}{{{n + 1}^{{91}}}}",
        ],
    )


def dollars(n: int) -> tuple[str, list[str], list[str]]:
    amounts = [f"\\${n}", f"${n}", f"{n} dollars", f"**\\${n}**", f"$\\${n}$", f"${n}.00"]
    wrong = [f"\\${n + 1}", f"${n}0", f"**\\${n}.50**", f"-\\${n}"]
    return f"#### {n}", amounts, wrong


def emphasis(n: int) -> tuple[str, list[str], list[str]]:
    forms = ["**{}**", "`{}`", "*{}*", "__{}__", "**`{}`**", "***{}***", "**${}$**", "`{}`."]
    return (
        str(n),
        [form.format(n) for form in forms],
        [form.format(n + 1) for form in forms],
    )


def approximate(n: int) -> tuple[str, list[str], list[str]]:
    value = (n * n + 1) ** 0.5
    return (
        f"\\sqrt{{{n * n + 1}}}",
        [f"\\approx {value:.8f}", f"{value:.9f}", f"≈ {value:.7f}", f"\\approx{value:.8f}"],
        [f"\\approx {n}", f"\\approx {value + 0.01:.8f}", f"{value:.2f}", f"\\approx {n + 1}"],
    )


def per_cent(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"{n}.5\\%",
        [f"{n}.5%", f"{n}.50\\%", f"{n}.5", f"{n}.5 \\%"],
        [f"{n}.6\\%", f"{n}\\%", f"0.{n}5\\%", f"{n}5%"],
    )


def units(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"{n} \\text{{ cm}}",
        [f"{n}", f"{n}\\text{{ cm}}", f"{n} cm", f"{n}\\,\\mathrm{{cm}}", f"{n}.0"],
        [f"{n + 1}\\text{{ cm}}", f"{n}.5 cm", f"-{n}", f"{n}^2"],
    )


def lists(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"(0.000000{n}, {n})",
        [f"\\left(0.000000{n}, {n}\\right)", f"( 0.000000{n} ,\\, {n} )"],
        [f"(0.000000{n + 1}, {n})", f"({n}, 0.000000{n})", f"(0, {n})", f"{n}"],
    )


def equations(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"x = {n}",
        [f"x={n}", f"{n}", f"x = {n}.0", f"\\boxed{{x = {n}}}", f"x = \\frac{{{2 * n}}}{{2}}"],
        [f"x = {n + 1}", f"y = {n}", f"x = -{n}", f"{n} = x + 1"],
    )


def thousands(n: int) -> tuple[str, list[str], list[str]]:
    number = f"{n},{n:03d},007"
    return (
        number.replace(",", ""),
        [number, number.replace(",", "{,}"), number.replace(",", "\\,"), f"{number}.00"],
        [number.replace("007", "008"), f"{n}", f"{n}.{n:03d}007", number.replace(",", "", 1) + "0"],
    )


KINDS: list[Kind] = [
    *(tiny, decimals, long_decimals, huge, quotients, dollars, emphasis),
    *(approximate, per_cent, units, lists, equations, thousands),
]
SENTENCES = ("\\boxed{%s}", "The answer is %s.", "#### %s", "Therefore it is %s.")


def cases(kind: Kind) -> Iterator[tuple[str, str, str, float]]:
    """Yields an answer, a right response, a wrong response and the number of the case."""
    for n in range(2, 2 + COUNT):
        answer, right, wrong = kind(n)
        for text, score in ((right[n % len(right)], 1.0), (wrong[n % len(wrong)], 0.0)):
            yield answer, text, SENTENCES[n % len(SENTENCES)], score


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_right_answers_score_1_and_wrong_ones_0(kind: Kind) -> None:
    misjudged = [
        (answer, sentence % text, score)
        for answer, text, sentence, score in islice(cases(kind), 2 * COUNT)
        if math_answer("", sentence % text, answer, {}) != score
    ]
    assert misjudged == []
