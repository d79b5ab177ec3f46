"""Responses that try to be expensive to judge, for the test and the benchmark of ``math_verify``."""

import random
from collections.abc import Iterator

SIGNS = (
    *(
        "(",
        "{",
        "[",
        "\u00bd",
        "[1,",
        "(1,",
        "{1,",
        "\\{",
        "\\frac{",
        "\\frac",
        "\\sqrt{",
        "\\sqrt",
        "^{9",
        "9^",
    ),
    *(
        "^",
        "_",
        "!",
        "9!",
        "|",
        "\\left(",
        "\\begin{pmatrix}",
        "1&2\\\\",
        "1,",
        "1;",
        "1=",
        "x=",
        "=",
        "1<",
        "x^2+",
    ),
    *(
        "(x+1)",
        "(x+1)^9",
        "x*",
        "+1",
        "-",
        "\\pm ",
        "\\binom{9}{3}",
        "\\binom{",
        "\\int ",
        "\\sum_{n=1}^{99}",
    ),
    *(
        "\\log",
        "\\sin",
        "sin(",
        "e^{",
        "10^",
        "1/",
        "/",
        "%",
        "$",
        "\\$",
        "\u00b0",
        "or ",
        "and ",
        "x or ",
        "1 and ",
    ),
    *(
        "\\text{",
        "\\text{and}",
        "\\cup",
        "[1,2]\\cup",
        "\\infty",
        "\u00b2",
        "\u2082",
        "\u0663",
        "one ",
        "hundred ",
    ),
    *(
        "million ",
        "1 million ",
        "half ",
        "dozen ",
        "1:",
        "3:30 ",
        "0.",
        ".",
        "1.2.3,",
        "1 000 ",
        "1,000,",
        "####",
    ),
    *(
        "\\overline{3}",
        "\\boxed{",
        "<answer>",
        "**",
        "`",
        "__",
        "*",
        "a",
        "(A) ",
        "xyz",
        "\\mathrm{",
        "km/h ",
        "1 m ",
    ),
    *(
        "5 hours ",
        "^\\circ",
        "\\pi",
        "\\ldots",
        "is ",
        "answer is ",
        "Answer: ",
        "since ",
        "because ",
        "not ",
        "9",
    ),
    *(
        "0",
        " ",
        "\n",
        "\t",
        "))",
        "}",
        "]",
        "C(9,",
        "9 choose ",
        "_2",
        "0x",
        "1e9",
        "1e",
        "i",
        "\\le ",
        "\\in",
        "\\",
    ),
    *("&", "\u20ac", "5 euros ", "1 cent ", "%%", "'", "for x ", "where ", "if "),
)
EXPRESSIONS = (
    *(
        "9^{9^{9^9}}",
        "99999999!",
        "9!!!!",
        "\\binom{99999999}{4999999}",
        "(10^{9})!",
        "x^{99999}",
        "(x+1)^{9999}",
    ),
    *(
        "(x+y+z)^{500}",
        "\\sum_{n=1}^{1000000000} n",
        "\\prod_{n=1}^{99999} n",
        "\\int_0^1 x^{x^x} dx",
    ),
    *("\\sqrt[99999999]{2}", "\\log_{2}(9^{999999})", "2^{2^{2^{2^{2^2}}}}", "\\frac{1}{0}", "0^0"),
    *(
        "\\infty - \\infty",
        "\\tan(10^{99999})",
        "e^{e^{e^{e^e}}}",
        "(((9^9)^9)^9)^9",
        "9**9**9",
        "9^9^9^9",
    ),
    *(
        "\\frac{9^{99999}}{7^{99999}}",
        "(1+\\frac{1}{10^{9}})^{10^{9}}",
        "100000!/99999!",
        "\\Gamma(99999)",
    ),
    *(
        "x^{10}+" * 50 + "1=0",
        "\\begin{pmatrix}" + "1&2\\\\" * 300 + "\\end{pmatrix}",
        "1+" * 900 + "1",
    ),
    *(
        "\\{" + ",".join(map(str, range(600))) + "\\}",
        "x<" * 500 + "1",
        "\\lim_{n\\to\\infty} n^{n!}",
    ),
    "\\cup".join(f"({start},{start + 1})" for start in range(0, 200, 2)),
    *(f"{sign}{{" * 200 + "2" + "}" * 200 for sign in ("\\sqrt", "\\frac{1}", "2^")),
    *(
        "(" * 400 + "1" + ")" * 400,
        "\\sin(" * 100 + "1" + ")" * 100,
        "x!" * 200,
        "1.5!",
        "(-99999)!",
    ),
    *(
        "10^{10^{10}}",
        "(10^{5})^{(10^{5})}",
        "\\binom{10^6}{10^5}",
        "((10!)!)!",
        "123456789012345^{12345}",
    ),
    *(
        "(x+1)(x+2)" * 100,
        "\\prod_{k=1}^{500}(x+k)",
        "\\sum_{k=1}^{50000} \\frac{1}{k}",
        "x^5 - x + 1 < 0",
    ),
    *(
        "\\int \\frac{1}{x^{99}+1} dx",
        "x^{99} + x < 3",
        "\\sin x < x^{x}",
        "\\frac{d}{dx} x^{x^{x^x}}",
    ),
)
FORMS = (
    *(
        "%s",
        "The answer is %s",
        "\\boxed{%s}",
        "#### %s",
        "$%s$",
        "<answer>%s</answer>",
        "x = %s",
        "%s apples",
    ),
    *(
        "Some words and then 3 apples, so %s",
        "%s\n%s",
        "The answer is: $%s$.",
        "Answer: %s m",
        "= %s",
        "35 = %s",
    ),
    *("%s = 35", "%s or 35", "It costs $%s"),
)
ANSWERS = (
    *(
        "35",
        "\\frac{1}{3}",
        "x^2+2x+1",
        "\\{1,2,3\\}",
        "(3, 4)",
        "[1,2)",
        "5 km",
        "B",
        "\\text{east}",
        "2\\sqrt{3}",
    ),
    *(
        "25\\%",
        "3:4",
        "11:45",
        "x < 3",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "$18",
        "0.333",
        "\\pi",
        "123_5",
    ),
    *("3+2i", "1,2,3", "x=1 or x=2"),
)
QUESTIONS = (
    *("", "How many pages does Tom read if he reads 5 pages per day for 7 days?", "Find x."),
    *("What is the area in square feet?", "How much does Ann pay?", "What is the ratio of a to b?"),
)


def responses(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yields question, expected answer and response."""
    source = random.Random(seed)
    for _ in range(count):
        kind = source.random()
        if kind < 0.3:
            text = source.choice(SIGNS) * source.choice((50, 500, 2000, 8000, 30000))
        elif kind < 0.5:
            text = source.choice(EXPRESSIONS)
        elif kind < 0.7:
            text = "".join(source.choices(SIGNS, k=source.choice((5, 30, 200, 2000))))
        elif kind < 0.85:
            text = "".join(source.sample(SIGNS, 2)) * source.choice((30, 300, 3000))
        else:
            text = source.choice("+*^/=,!").join(source.sample(EXPRESSIONS, 2))
        form = source.choice(FORMS)
        yield source.choice(QUESTIONS), source.choice(ANSWERS), form.replace("%s", text)
