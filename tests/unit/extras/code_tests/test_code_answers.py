"""Tests of the forms in which data sets write the tests of a program, and of programs that cheat on them."""

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.extras.bubblewrap import seccomp
from services.extras.code_tests.answers import JudgedTests, OutputTests, read_tests
from services.extras.code_tests.blocks import find_program
from services.extras.code_tests.reward import code_tests
from services.extras.code_tests.verdicts import same_output

PROGRAMS = {
    kind: {name: "\n".join(lines) for name, lines in programs.items()}
    for kind, programs in json.loads(
        Path(__file__).with_name("code_programs.json").read_text()
    ).items()
}
pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="needs Linux")

MUL = "def mul(a, b):\n    return a * b"
STDIN = "a, b = map(int, input().split())\nprint(a * b)"
SOLUTION = """\
class Solution:
    def mul(self, a: List[int], b: int) -> List[int]:
        return [x * b for x in a]
"""
SUM_LIST = """\
class Solution:
    def double(self, head: Optional[ListNode]) -> Optional[ListNode]:
        first = head
        while head:
            head.val *= 2
            head = head.next
        return first
"""
NODES = """\
from typing import *

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def is_same_list(one, other):
    while one and other and one.val == other.val:
        one, other = one.next, other.next
    return one is None and other is None
"""
HUMAN_EVAL = {
    "prompt": "from typing import List\n\n\ndef mul(a: int, b: int) -> int:\n    '''Multiplies.'''\n",
    "entry_point": "mul",
}
CHECK = """\
METADATA = {}

def check(candidate):
    assert candidate(2, 3) == 6
    assert candidate(7, 8) == 56
"""
HUMAN_EVAL_PLUS = """\
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if atol != 0:
        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp

def check(candidate):
    inputs = [[2, 3], [7, 8]]
    results = [6, 56]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
PYTEST = """\
from solution import mul

def test_small():
    assert mul(2, 3) == 6

def test_large():
    assert mul(70, 80) == 5600
"""
CASE = """\
import unittest

class TestMul(unittest.TestCase):
    def setUp(self):
        self.expected = 6

    def test_mul(self):
        self.assertEqual(mul(2, 3), self.expected)

if __name__ == "__main__":
    unittest.main()
"""

# Form: answer, right program, row.
FORMS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "asserts": ("assert mul(2, 3) == 6", MUL, {}),
    "MBPP": (["assert mul(2, 3) == 6", "assert mul(7, 8) == 56"], MUL, {}),
    "MBPP as JSON text": (json.dumps(["assert mul(2, 3) == 6", "assert mul(7, 8) == 56"]), MUL, {}),
    "MBPP with set-up code": (
        ["assert mul(2, SIX) == 12"],
        MUL,
        {"test_setup_code": "SIX = 6", "test_imports": ["import math"]},
    ),
    "MBPP, a built-in's name": (["assert sum(10, 15) == 25"], "def sum(a, b): return a + b", {}),
    "HumanEval": (CHECK, MUL, HUMAN_EVAL),
    "HumanEval, only the body": (CHECK, "    return a * b", HUMAN_EVAL),
    "HumanEval that calls itself": (f"{CHECK}\ncheck(mul)", MUL, {}),
    "HumanEval+": (HUMAN_EVAL_PLUS, MUL, HUMAN_EVAL),
    "HumanEval as a mapping": ({"test": CHECK, "entry_point": "mul"}, MUL, {}),
    "stdin": ({"inputs": ["2 3\n", "7 8\n"], "outputs": ["6\n", "56\n"]}, STDIN, {}),
    "stdin as JSON text": (json.dumps({"inputs": ["2 3"], "outputs": ["6"]}), STDIN, {}),
    "stdin as Python prints it": (str({"inputs": ["2 3"], "outputs": ["6"]}), STDIN, {}),
    "stdin in lines": ({"inputs": [["2 3"]], "outputs": [["6"]]}, STDIN, {}),
    "a list of tests": ([{"input": "2 3", "output": "6"}], STDIN, {}),
    "a list of JSON texts": ([json.dumps({"input": "2 3", "output": "6"})], STDIN, {}),
    "CodeContests": (
        {
            "public_tests": {"input": ["2 3\n"], "output": ["6\n"]},
            "private_tests": {"input": [], "output": []},
        },
        STDIN,
        {},
    ),
    "APPS": (json.dumps({"fn_name": "mul", "inputs": [[2, 3]], "outputs": [[6]]}), MUL, {}),
    "APPS, results as they are": ({"fn_name": "mul", "inputs": [[2, 3]], "outputs": [6]}, MUL, {}),
    "APPS, stdin with fn_name null": (
        {"fn_name": None, "inputs": ["2 3"], "outputs": ["6"]},
        STDIN,
        {},
    ),
    "TACO, a class": (
        json.dumps({"fn_name": "mul", "inputs": [[[1, 2], 3]], "outputs": [[3, 6]]}),
        SOLUTION,
        {},
    ),
    "a list with fn_name": (
        [{"fn_name": "mul", "type": "function_call", "input": [2, 3], "output": [6]}],
        MUL,
        {},
    ),
    "SYNTHETIC-1": (
        json.dumps(
            {
                "language": "python",
                "test_cases": [{"type": "stdin_stdout", "input": "2 3", "output": "6"}],
            }
        ),
        STDIN,
        {},
    ),
    "LiveCodeBench, functional": (
        json.dumps(
            [
                {
                    "input": "[1, 2]\n3",
                    "output": "[3, 6]",
                    "testtype": "functional",
                    "metadata": {"func_name": "mul"},
                }
            ]
        ),
        SOLUTION,
        {},
    ),
    "LiveCodeBench, the row has the name": (
        json.dumps([{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}]),
        SOLUTION,
        {"metadata": '{"func_name": "mul"}'},
    ),
    "LiveCodeBench, stdin": (
        json.dumps([{"input": "2 3", "output": "6", "testtype": "stdin"}]),
        STDIN,
        {"metadata": "{}"},
    ),
    "LeetCodeDataset": (
        "def check(candidate):\n    assert candidate(a = [1, 2],b = 3) == [3, 6]",
        SOLUTION,
        {"entry_point": "Solution().mul", "prompt": NODES},
    ),
    "LeetCodeDataset, pairs": (
        [{"input": "a = [1, 2], b = 3", "output": "[3, 6]"}],
        SOLUTION,
        {"entry_point": "Solution().mul"},
    ),
    "LeetCodeDataset, nodes": (
        "def check(candidate):\n"
        "    assert is_same_list(candidate(head = list_node([1,2,3])), list_node([2,4,6]))",
        SUM_LIST,
        {"entry_point": "Solution().double", "prompt": NODES},
    ),
    "KodCode": (PYTEST, MUL, {}),
    "a class of tests": (
        "class TestMul:\n    def test_mul(self):\n        assert mul(2, 3) == 6",
        MUL,
        {},
    ),
    "a TestCase": (CASE, MUL, {}),
    "JSON text of a JSON text": (
        json.dumps(json.dumps({"inputs": ["2 3"], "outputs": ["6"]})),
        STDIN,
        {},
    ),
    "bytes": (json.dumps({"inputs": ["2 3"], "outputs": ["6"]}).encode(), STDIN, {}),
    "an array of numpy": (np.array(["assert mul(2, 3) == 6"], dtype=object), MUL, {}),
    "names of streams": ([{"stdin": "2 3", "stdout": "6"}], STDIN, {}),
    "an expected output": ([{"input": "2 3", "expected_output": "6"}], STDIN, {}),
    "asserts beside empty inputs": (
        {"inputs": [""], "outputs": [""], "assert_case": ["assert mul(2, 3) == 6"]},
        MUL,
        {},
    ),
    "MBPP, a mapping with set-up code": (
        {"setup_code": "SIX = 6", "test_list": ["assert mul(2, 3) == SIX"]},
        MUL,
        {},
    ),
    "an exception that is expected": (
        "try:\n    mul('a', 'b')\n    assert False\nexcept TypeError:\n    pass\nassert mul(2, 3) == 6",
        MUL,
        {},
    ),
    "two results that are right": (
        "try:\n    assert mul(2, 3) == 7\nexcept AssertionError:\n    assert mul(2, 3) == 6",
        MUL,
        {},
    ),
    "a condition that raises": ("if mul(2, 3) != 6:\n    raise ValueError('wrong')", MUL, {}),
}


@pytest.mark.parametrize(("answer", "program", "row"), FORMS.values(), ids=FORMS)
def test_each_form_gives_a_right_program_1_and_others_0(
    answer: Any, program: str, row: dict[str, Any]
) -> None:
    assert code_tests("", f"```python\n{program}\n```", answer, row) == 1.0
    for other in ("pass", program.replace("*", "+ 3 +").replace("a + b", "a - b")):
        assert code_tests("", f"```python\n{other}\n```", answer, row) == 0.0


REFUSED: dict[str, Any] = {
    **PROGRAMS["refused"],
    "nothing": None,
    "empty": "",
    "a number": 6,
    "a number as text": "6",
    "a comment": "# assert mul(2, 3) == 6",
    "words": "The product of the numbers.",
    "an expression": "mul(2, 3) == 6",
    "an assert of nothing": "assert True",
    "an assert of a tuple": "assert (mul(2, 3) == 6, 'the product')",
    "an assert that is always true": "assert mul(2, 3) == 6 or True",
    "no result": {"fn_name": "mul", "inputs": [[2, 3]], "outputs": [None]},
    "output of a function": (
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as file:\n    mul(2, 3)\n"
        "assert file.getvalue() == '6'"
    ),
    "input of a function": "import builtins\nbuiltins.input = lambda: '2'\nassert mul(2, 3) == 6",
    "coroutines": "import asyncio\nassert asyncio.run(mul(2, 3)) == 6",
    "a doctest": ">>> mul(2, 3)\n6",
    "no tests": {"inputs": [], "outputs": []},
    "an empty list": [],
    "different numbers": {"inputs": ["1", "2"], "outputs": ["1"]},
    "no outputs": {"inputs": ["1"]},
    "outputs that nothing prints": {"inputs": ["1"], "outputs": [""]},
    "arguments without a name": {"inputs": [[2, 3]], "outputs": [[6]]},
    "functional without a name": [{"input": "2\n3", "output": "6", "testtype": "functional"}],
    "another language": {"language": "cpp", "test_cases": [{"input": "2 3", "output": "6"}]},
    "other keys": {"hidden": "x"},
    "broken JSON": '{"inputs": ["2 3"], "outputs": ["6"',
    "broken code": "assert mul(2, 3) ==",
}


@pytest.mark.parametrize("answer", REFUSED.values(), ids=REFUSED)
def test_what_tests_no_program_is_a_failure_not_a_score(answer: Any) -> None:
    for program in (MUL, "pass"):
        with pytest.raises(ValueError, match="code_tests"):
            code_tests("", f"```python\n{program}\n```", answer, {})


SWALLOWED = {
    "prints it": "try:\n    assert mul(2, 3) == 6\nexcept AssertionError as error:\n    print(error)",
    "in a function": (
        "def test():\n    try:\n        assert mul(2, 3) == 6\n        print('passed')\n"
        "    except Exception as error:\n        print('failed', error)\ntest()"
    ),
    "goes on": (
        "for a, b, c in [(2, 3, 6), (7, 8, 56)]:\n    try:\n        assert mul(a, b) == c\n"
        "    except:\n        continue"
    ),
    "suppresses it": (
        "import contextlib\nwith contextlib.suppress(Exception):\n    assert mul(2, 3) == 6"
    ),
    "expects any exception": (
        "import pytest\ndef test_text():\n    with pytest.raises(Exception):\n        mul('a', 'b')"
    ),
}


@pytest.mark.parametrize("tests", SWALLOWED.values(), ids=SWALLOWED)
def test_tests_that_catch_their_own_failure_fail(tests: str) -> None:
    assert code_tests("", MUL, tests, {}) == 1.0
    for program in ("def mul(a, b):\n    return str(a) + str(b)", "pass"):
        assert code_tests("", program, tests, {}) == 0.0


@pytest.mark.parametrize(
    "check",
    [
        "np.allclose(mul(2.0, 3.0), 6.0)",
        "np.testing.assert_allclose(mul(2.0, 3.0), 6.0) is None",
        "np.testing.assert_array_equal(mul(2.0, 3.0), [6.0]) is None",
    ],
)
def test_an_empty_result_is_close_to_nothing(check: str) -> None:
    tests = f"import numpy as np\nassert {check}"
    assert code_tests("", MUL, tests, {}) == 1.0
    assert code_tests("", "def mul(a, b):\n    return []", tests, {}) == 0.0


def test_the_time_of_the_tests_is_no_time_of_the_program() -> None:
    tests = "import time\ntime.sleep(0.6)\nassert mul(2, 3) == 6"
    assert code_tests("", MUL, tests, {}, seconds=0.5) == 1.0


CHEATS = PROGRAMS["cheats"]
JUDGED = {
    "assert": ("assert mul(2, 3) == 6", {}),
    "difference": ("assert abs(mul(2, 3) - 6) < 1e-6", {}),
    "check": (HUMAN_EVAL_PLUS, HUMAN_EVAL),
    "TestCase": (CASE, {}),
    "function": ({"fn_name": "mul", "inputs": [[2, 3]], "outputs": [[6]]}, {}),
}


def adapted(cheat: str, program: str) -> str:
    """Returns a cheat on ``mul`` with the names, or the standard input, of a form's right program."""
    if program == STDIN:
        return f"{cheat}\ntry: print(mul(*map(int, input().split())))\nexcept EOFError: pass"
    if "class Solution" in program:
        return f"{cheat}\nclass Solution:\n    def mul(self, *a, **k): return mul(*a, **k)\n    double = mul"
    return f"{cheat}\nsum = mul" if "def sum" in program else cheat


SAMPLE = [
    (f"{cheat} on {form}", cheat, form)
    for number, cheat in enumerate(CHEATS)
    for form in [[*FORMS][number * 7 % len(FORMS)], [*FORMS][(number * 5 + 3) % len(FORMS)]]
]
"""Two forms for each cheat; ``python -m bench.cheats`` tries every cheat on every form."""


@pytest.mark.parametrize(
    ("cheat", "form"), [case[1:] for case in SAMPLE], ids=[case[0] for case in SAMPLE]
)
def test_a_program_that_cheats_earns_nothing(cheat: str, form: str) -> None:
    answer, program, row = FORMS[form]
    response = f"```python\n{adapted(CHEATS[cheat], program)}\n```"
    assert code_tests("", response, answer, row, seconds=1.0) == 0.0


@pytest.mark.parametrize(
    ("answer", "row"),
    [*JUDGED.values(), (PYTEST, {}), (FORMS["LeetCodeDataset"][0], FORMS["LeetCodeDataset"][2])],
    ids=[*JUDGED, "pytest", "method"],
)
def test_a_right_program_that_exits_earns_nothing(answer: Any, row: dict[str, Any]) -> None:
    assert isinstance(read_tests(answer, row), JudgedTests)
    program = SOLUTION if "Solution" in str(row) else MUL
    for ending in ("import os\nos._exit(0)", "exit()"):
        assert code_tests("", f"```python\n{program}\n{ending}\n```", answer, row) == 0.0


STATEFUL = """\
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise EmptyError('empty')
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)

class EmptyError(ValueError): pass

class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    def __eq__(self, other): return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
    def __repr__(self): return f'Vector({self.x}, {self.y})'

def reverse(items): items.reverse()
def squares(count):
    for number in range(count): yield number ** 2
def apply(function, *values): return [function(value) for value in values]
def many(): return (1, [2, {3}], {'a': (4.5, None)}, b'x', 1 + 2j, frozenset({1}))
TOTAL = 7
"""
USES = PROGRAMS["uses"]


@pytest.mark.parametrize("tests", USES.values(), ids=USES)
def test_tests_use_what_the_program_defines(tests: str) -> None:
    assert code_tests("", f"```python\n{STATEFUL}\n```", tests, {}) == 1.0


def test_the_fraction_of_tests_counts_those_after_an_exit() -> None:
    tests = [f"assert f({number}) == {number}" for number in range(4)]
    program = (
        "import os\ndef f(x):\n    if x == 1: exit()\n    if x == 2: os._exit(0)\n    return x"
    )
    assert code_tests("", program, tests, {}, partial_credit=True) == 0.5
    assert code_tests("", program, tests, {}) == 0.0


def test_a_main_guard_does_not_run_where_tests_call_functions() -> None:
    program = f"{MUL}\nif __name__ == '__main__':\n    print(mul(*map(int, input().split())))"
    assert code_tests("", program, "assert mul(2, 3) == 6", {}) == 1.0
    assert code_tests("", program, {"inputs": ["2 3"], "outputs": ["6"]}, {}) == 1.0


def test_one_reading_of_expected_results_holds_for_all_tests() -> None:
    answer = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}
    assert code_tests("", "def f(x): return x", answer, {}) == 1.0
    assert code_tests("", "def f(x): return [x]", answer, {}) == 1.0
    assert code_tests("", "def f(x): return x if x == 1 else [x]", answer, {}) == 0.0


FENCES = [
    ("```python", "```"),
    ("```python3", "```"),
    ("```Python", "```"),
    ("``` python", "```"),
    ("```py", "```"),
    ("```PYTHON", "```"),
    ('```python title="a.py"', "```"),
    ("```python:solution.py", "```"),
    ("```{.python}", "```"),
    ("```", "```"),
    ("~~~python", "~~~"),
    ("````python", "````"),
    ("```python", ""),
]
INDENTS = ["", "   ", "> "]
LATER = ["", "Output:\n```\n6\n```", "```text\n6\n```", "```bash\npython a.py\n```"]


def test_a_program_is_found_in_every_fence() -> None:
    for (opening, closing), indent, later in product(FENCES, INDENTS, LATER):
        if not closing and later:
            continue
        lines = [opening, *MUL.splitlines(), "x = '``'", *([closing] if closing else [])]
        fenced = "\n".join(indent + line for line in lines)
        response = f"Here it is:\n\n{fenced}\n\n{later}\n"
        names: dict[str, Any] = {}
        exec(find_program(response), names)
        assert "mul" in names, response
        assert names["mul"](2, 3) == 6


@pytest.mark.parametrize("depth", [1_000, 1_800, 3_500])
@pytest.mark.parametrize("chain", ["1 + ", "-", "not "])
def test_an_expression_that_is_too_deep_for_a_tree_fails_no_reward(chain: str, depth: int) -> None:
    program = f"x = {chain * depth}1"

    def found(depth_of_call: int) -> str:
        return (
            found(depth_of_call - 1)
            if depth_of_call
            else find_program(f"```python\n{program}\n```")
        )

    assert found(500).strip() == program


def test_the_last_program_counts() -> None:
    blocks = "```python\na = 1\n```\ntext\n```python\na = 2\n```\n```\na = 3\n```\n```python\n>>> a\n2\n```"
    assert find_program(blocks) == "a = 2\n"
    assert find_program("```\na = 1\n```\n```\n6 7\n```") == "a = 1\n"
    assert find_program("```json\n{}\n```") == ""


STRING = '    """\n    ```{}\n    mul(2, 3)\n    ```\n    """\n'
WITH_STRING = MUL.replace("    return", STRING + "    return")
RESPONSES = {
    "another name of the language": f"```python-3\n{MUL}\n```",
    "the name of a file": f"```solution.py\n{MUL}\n```",
    "another label": f"```code\n{MUL}\n```",
    "a fence in a string": f"```python\n{WITH_STRING.format('')}\n```",
    "a labelled fence in a string": f"```python\n{WITH_STRING.format('python')}\n```",
    "a fence at the start of a string's line": f'```python\ns = """\n```\n"""\n{MUL}\n```',
    "a block of Markdown": f"````markdown\n```python\n{MUL}\n```\n````",
    "an end on the last line": f"```python\n{MUL}```",
    "an end with a token": f"```python\n{MUL}\n```<|im_end|>",
    "a start on the first line": f"```python {MUL}\n```",
    "lines of Windows": f"```python\n{MUL}\n```".replace("\n", "\r\n"),
    "another separator of lines in a string": f"```python\ns = 'a\u2028b\x1c'\n{MUL}\n```",
    "spaces that do not break": f"```python\n{MUL}\n```".replace("    ", "\xa0" * 4),
    "a mark of the byte order": f"\ufeff```python\n{MUL}\n```",
    "a command of a notebook": f"```python\n%load_ext x\n!pip install x\n{MUL}\n```",
    "a start after other text": f"Here is the code: ```python\n{MUL}\n```",
    "a start after other text, then output": f"Code:```Python3\n{MUL}\n```\nIt prints\n```\n6\n```",
    "a fence in a comment without a block": f"# as in: ```python\n# mul(2, 3)\n# ```\n{MUL}",
    "an interpreter's session": "```python\n>>> def mul(a, b):\n"
    "...     return a * b\n...\n>>> mul(2, 3)\n6\n```",
    "an example after it": f"```python\n{MUL}\n```\nSo:\n```python\nprint(mul(2, 3))\n```",
    "a test after it": f"```python\n{MUL}\n```\n"
    "```python\nfrom solution import mul\nassert mul(2, 3)\n```",
    "two parts": "```python\ndef times(a, b):\n    return a * b\n```\n"
    "```python\ndef mul(a, b):\n    return times(a, b)\n```",
    "tags": f"<answer>\n{MUL}\n</answer>",
    "HTML": f'<pre><code class="language-python">{MUL} if a &lt; 9 else 0\n</code></pre>',
    "LaTeX": f"\\begin{{lstlisting}}[language=Python]\n{MUL}\n\\end{{lstlisting}}",
    "no fence but the language": f"python\n{MUL}",
}


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_a_program_is_found_in_responses_of_other_kinds(response: str) -> None:
    names: dict[str, Any] = {}
    exec(find_program(response), names)
    assert names["mul"](2, 3) == 6


def test_a_response_of_fences_alone_takes_little_time() -> None:
    start = time.process_time()
    for line in ("```python", "x ```", "```", "``` `` ```"):
        find_program("```python\n" + f"{line}\n" * 4000)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("expected", "output", "is_same"),
    [
        ("6\n", "6", True),
        ("1 2\n3", "1 2 3\n", True),
        ("0.5", "0.50", True),
        ("0.3", "0.30000000000000004", True),
        ("1.0", "1", True),
        ("0.0000003", "0.0000001", False),
        ("0.0", "1e-17", True),
        ("3.0e-12", "1.0e-12", False),
        ("0.1", "0.2", False),
        ("6", "6.1", False),
        ("YES", "yes", False),
        ("100000000000000000001", "100000000000000000002", False),
        ("1e400.", "2", False),
    ],
)
def test_outputs_are_equal_word_by_word(expected: str, output: str, is_same: bool) -> None:
    assert same_output(expected, output) is is_same


def test_a_row_with_an_entry_point_and_texts_of_standard_input_reads_them() -> None:
    tests = read_tests([{"input": "2 3", "output": "6", "type": "stdin_stdout"}], HUMAN_EVAL)
    assert tests == OutputTests((("2 3", "6"),))
