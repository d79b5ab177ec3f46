"""Tests of ``math_verify`` with right and wrong answers of twenty kinds, made by rules from a number."""

# ruff: noqa: RUF001 -- signs that look like others are the subject
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from services.extras.math_verify.answer import math_answer

COUNT = 20
MANY_POWERS = "3x^{2}y^{3}-2x^{2}-3x^{3}-2y^{2}-3y^{3}z^{2}-2z^{3}x^{2}-3z^{2}y^{3}=4"
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


def mixed(n: int) -> tuple[str, list[str], list[str]]:
    below = n + 100
    return (
        f"{n} 1/{below}",
        [f"{n}\\frac{{1}}{{{below}}}", f"\\frac{{{n * below + 1}}}{{{below}}}", f"{n} 1/{below}"],
        [f"{n}1/{below}", f"\\frac{{{n}1}}{{{below}}}", f"{n}", f"1/{below}"],
    )


def apart(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"{n}7",
        [f"{n}7", f"{n}7.0", f" {n}7 "],
        [f"\\boxed{{{n} 7}}", f"\\boxed{{{n}\\ 7}}", f"\\boxed{{{n},7}}", f"\\boxed{{{n}~7}}"],
    )


def chains(n: int) -> tuple[str, list[str], list[str]]:
    return (
        str(n + 1),
        [
            f"\\boxed{{{n}+1={n + 1}}}",
            f"\\boxed{{x = {n}+1 = {n + 1}}}",
            f"\\boxed{{\\frac{{{2 * n + 2}}}{{2}}={n + 1}}}",
            f"\\boxed{{\\sqrt{{{(n + 1) ** 2}}} \\approx {n + 1}}}",
        ],
        [
            f"\\boxed{{{n}={n + 1}}}",
            f"\\boxed{{{n} \\approx {n + 1}}}",
            f"\\boxed{{{n}+2={n + 1}}}",
            f"\\boxed{{{n}.4 \\approx {n + 1}}}",
        ],
    )


def changed(n: int) -> tuple[str, list[str], list[str]]:
    return (
        str(n),
        [
            f"\\boxed{{{n}\\text{{ boys and girls}}}}",
            f"\\boxed{{\\text{{about }} {n}}}",
            f"\\boxed{{{n}\\text{{ square units}}}}",
            f"\\boxed{{{n} meters squared}}",
        ],
        [
            f"\\boxed{{{n}\\text{{ or more}}}}",
            f"\\boxed{{{n}\\text{{ and a half}}}}",
            f"\\boxed{{{n} squared}}",
            f"\\boxed{{{n}\\text{{ is wrong}}}}",
            f"\\boxed{{{n}\\text{{ factorial}}}}",
            f"\\boxed{{{n}\\text{{ and up}}}}",
            f"It is {n} squared.",
            f"The answer is {n} and a third.",
            f"{n} doubled",
            f"{n} or more",
        ],
    )


RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
LOWERED = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def unicode(n: int) -> tuple[str, list[str], list[str]]:
    raised = str(n).translate(RAISED)
    return (
        f"x^{{{n}}}-\\frac{{1}}{{2}}",
        [f"x{raised}−½", f"𝑥{raised} − ½", f"x^{n}-½", f"x{raised}-\\frac12"],
        [f"x{raised}+½", f"x{n}−½", f"x{raised}−⅓", f"x{str(n + 1).translate(RAISED)}−½"],
    )


def indices(n: int) -> tuple[str, list[str], list[str]]:
    lowered = str(n).translate(LOWERED)
    return (
        f"a_{{{n}}}\\cdot 10^{{-{n}}}",
        [f"a{lowered}·10{f'-{n}'.translate(RAISED)}", f"a_{{{n}}} × 10^{{-{n}}}"],
        [f"a{lowered}·10{str(n).translate(RAISED)}", f"a{lowered}", f"a_{{{n + 1}}}·10^{{-{n}}}"],
    )


def tags(n: int) -> tuple[str, list[str], list[str]]:
    return (
        str(n),
        [
            f"<answer>{n}</answer>",
            f"<answer> \\boxed{{{n}}} </answer>",
            f"#### {n}\nI hope it is correct.",
            f"<answer>{n + 1}</answer> no: <answer>{n}</answer>",
            f"\\fbox{{{n}}}",
        ],
        [
            f"<answer>{n + 1}</answer>",
            f"{n} <answer></answer>",
            f"#### {n + 1}\nI hope {n} is wrong.",
            f"<answer>{n}</answer> no: <answer>{n + 1}</answer>",
        ],
    )


def styles(n: int) -> tuple[str, list[str], list[str]]:
    return (
        str(n),
        [
            f"\\boxed{{\\underline{{{n}}}}}",
            f"\\boxed{{\\textcolor{{red}}{{{n}}}}}",
            f"\\boxed{{\\large {n}}}",
            f"\\boxed{{{n}\\ }}",
        ],
        [
            f"\\boxed{{\\phantom{{{n}}}}}",
            f"\\boxed{{\\underline{{{n + 1}}}}}",
            f"\\boxed{{\\cancel{{{n}}}}}",
            f"\\boxed{{\\textcolor{{red}}{{-{n}}}}}",
        ],
    )


def letters(n: int) -> tuple[str, list[str], list[str]]:
    right, wrong = "ABCDEFGHIJ"[n % 10], "ABCDEFGHIJ"[(n + 1) % 10]
    forms = [
        "\\boxed{(%s)}",
        "\\boxed{%s)}",
        "\\boxed{\\text{Option %s}}",
        f"%s) {n}",
        "\\boxed{%s}",
    ]
    return right, [form % right for form in forms], [form % wrong for form in forms]


def currencies(n: int) -> tuple[str, list[str], list[str]]:
    forms = [
        *(
            "Rs. {}",
            "Rs {}",
            "INR {}",
            "USD {}",
            "{} USD",
            "US${}",
            "€{}",
            "{} €",
            "{} EUR",
            "A\\${}",
        ),
        *("₩{}", "R$ {}", "{} kr", "\\text{{Rs. }}{}", "\\mathrm{{USD}}\\,{}", "{}¢", "Rs. {}/-"),
        *("\\text{{€}}{}", "CHF {}.00", "HK${}"),
    ]
    return str(n), [form.format(n) for form in forms], [form.format(n + 1) for form in forms]


def separators(n: int) -> tuple[str, list[str], list[str]]:
    forms = [
        "{}_234_567",
        "{},234,567",
        "{}'234'567",
        "{} 234 567",
        "{}.234.567",
        "{}\u2019234\u2019567",
    ]
    forms += ["{}\\,234\\,567", "{}\u202f234\u202f567", "{}{{,}}234{{,}}567", "{}.234.567,00"]
    return (
        f"{n}234567",
        [form.format(n) for form in forms],
        [f"{n}_234", f"{n}'234'568", f"{n}.234567", f"{n},234,56", f"{n}.234.568"],
    )


def scales(n: int) -> tuple[str, list[str], list[str]]:
    """Words that make a number another one; the wrong answers are about it."""
    words = {"dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6}
    words |= {"crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12}
    word, scale = list(words.items())[n % len(words)]
    value = (n + 1) * scale
    return (
        str(value),
        [
            f"{n + 1} {word}",
            f"\\${n + 1} {word}",
            f"{n + 1}\\text{{ {word}}}",
            f"{n + 1}.0 {word} units",
        ],
        [f"{n + 1}", f"{value} {word}", f"{value}\\text{{ {word}}}", f"\\${value} {word} dollars"],
    )


def shares(n: int) -> tuple[str, list[str], list[str]]:
    value = f"{n / 100:.2f}"
    wrong = [f"{n} per mille", f"{n}‰", f"{n} ppm", f"{n} basis points"]
    return value, [f"{n}%", f"{n} percent", f"{n} hundredths", f"{n} per cent"], [*wrong, f"{n}"]


def letter_scales(n: int) -> tuple[str, list[str], list[str]]:
    return (
        f"{n}000",
        [f"{n}k", f"{n}K", f"\\${n}k", f"{n}\\text{{k}}", f"{n} k"],
        [f"{n}000k", f"{n}000K", f"{n}M", f"{n}000M", f"\\${n}000B", f"{n}"],
    )


def words(n: int) -> tuple[str, list[str], list[str]]:
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    ones = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    ten, unit = n % len(tens), n % len(ones)
    value = 10 * (ten + 2) + unit + 1
    return (
        str(value),
        [
            f"{tens[ten]}-{ones[unit]}",
            f"{tens[ten]} {ones[unit]}",
            f"{tens[ten].title()}-{ones[unit]}",
        ],
        [tens[ten], ones[unit], f"{tens[ten - 1]}-{ones[unit]}", f"one hundred {ones[unit]}"],
    )


def further_units(n: int) -> tuple[str, list[str], list[str]]:
    names = ["sq ft", "°C", "Hz", "ft.", "MB", "kWh", "sq. m", "^\\circ F", "kPa", "lbs."]
    return (
        str(n),
        [f"{n} {name}" for name in names],
        [f"{n + 1} {name}" for name in names],
    )


KINDS: list[Kind] = [
    *(tiny, decimals, long_decimals, huge, quotients, dollars, emphasis),
    *(approximate, per_cent, units, lists, equations, thousands),
    *(mixed, unicode, indices),
    *(currencies, separators, scales, shares, letter_scales, words, further_units),
]
WHOLE: list[Kind] = [apart, chains, changed, tags, styles, letters]
"""Kinds whose responses are no part of a sentence."""
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


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: str(kind.__name__))
def test_right_responses_score_1_and_wrong_ones_0(kind: Kind) -> None:
    judged = [
        (answer, text, score)
        for n in range(2, 6)
        for answer, right, wrong in [kind(n)]
        for texts, score in ((right, 1.0), (wrong, 0.0))
        for text in texts
    ]
    assert [case for case in judged if math_answer("", case[1], case[0], {}) != case[2]] == []


def test_the_name_of_a_currency_is_an_answer() -> None:
    assert math_answer("", "The answer is USD.", "USD", {}) == 1.0
    assert math_answer("", "USD .5", "0.5", {}) == 1.0


def test_a_formula_of_many_powers_is_read_within_the_limit_of_time() -> None:
    other = MANY_POWERS.replace("=4", "=5")
    for answer, reward in ((MANY_POWERS, 1.0), (other, 0.0)):
        assert math_answer("", f"\\boxed{{{answer}}}", MANY_POWERS, {}) == reward


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("x^{3}+y^{3}=1", "y^{3}=1-x^{3}", "y^{3}=1+x^{3}"),
        ("y=\\frac{x^{3}+1}{2}", "2y=x^{3}+1", "2y=x^{3}+2"),
        (
            "2x^{2}y^{2}z^{3}+4x^{2}y^{3}+3x^{3}yz^{3}+2z^{2}=4",
            "x^{2}y^{2}z^{3}+2x^{2}y^{3}+\\frac{3}{2}x^{3}yz^{3}+z^{2}=2",
            "2x^{2}y^{2}z^{3}+4x^{2}y^{3}+3x^{3}yz^{3}+2z^{2}=5",
        ),
        (
            "(x-0.1y)^{4}=0",  # its root is repeated
            "x^{4}-0.4x^{3}y+0.06x^{2}y^{2}-0.004xy^{3}+0.0001y^{4}=0",
            "(x-0.2y)^{4}=0",
        ),
    ],
)
def test_equations_of_several_symbols_are_compared_by_their_solutions(
    expected: str, right: str, wrong: str
) -> None:
    rewards = [math_answer("", f"\\boxed{{{answer}}}", expected, {}) for answer in (right, wrong)]
    assert rewards == [1.0, 0.0]
