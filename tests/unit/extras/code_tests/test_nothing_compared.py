"""Tests of data sets that hold for an empty result: a program that no comparison has judged earns nothing."""

import pytest

from services.extras.bubblewrap import seccomp
from services.extras.code_tests.reward import code_tests

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="needs Linux")

RIGHT = "def f(n=3):\n    return [x * x for x in range(n)]"
IDLE = {
    "an empty list": "def f(n=3): return []",
    "an empty tuple": "def f(n=3): return ()",
    "an empty text": "def f(n=3): return ''",
    "an empty mapping": "def f(n=3): return {}",
    "a generator of nothing": "def f(n=3):\n    return\n    yield",
    "an iterator of nothing": "def f(n=3): return iter([])",
}
EXPECTED = "expected = [0, 1, 4]\n"
LOOP = "for a, b in zip(f(), expected):\n    assert a == b"

VACUOUS = {
    "all of a generator": "assert all(a == b for a, b in zip(f(), expected))",
    "all of a list": "assert all([a == b for a, b in zip(f(), expected)])",
    "all of map": "import operator\nassert all(map(operator.eq, f(), expected))",
    "all of map with a lambda": "assert all(map(lambda a, b: a == b, f(), expected))",
    "all of starmap": (
        "import itertools, operator\nassert all(itertools.starmap(operator.eq, zip(f(), expected)))"
    ),
    "not any": "assert not any(a != b for a, b in zip(f(), expected))",
    "any is False": "assert any(a != b for a, b in zip(f(), expected)) is False",
    "all of enumerate": "assert all(x == expected[i] for i, x in enumerate(f()))",
    "all of membership": "assert all(x in expected for x in f())",
    "all of a close number": (
        "import math\nassert all(math.isclose(a, b) for a, b in zip(f(), expected))"
    ),
    "all of a set": "assert all({a == b for a, b in zip(f(), expected)})",
    "all of positions": "r = f()\nassert all(r[i] == expected[i] for i in range(len(r)))",
    "all in a variable": "ok = all(a == b for a, b in zip(f(), expected))\nassert ok",
    "all with a type": (
        "r = f()\nassert isinstance(r, list | tuple | str | dict)"
        " and all(a == b for a, b in zip(r, expected))"
    ),
    "a sum of differences": "assert sum(a != b for a, b in zip(f(), expected)) == 0",
    "a sum of distances": "assert sum(abs(a - b) for a, b in zip(f(), expected)) < 1e-6",
    "the largest distance": (
        "assert max((abs(a - b) for a, b in zip(f(), expected)), default=0) < 1e-6"
    ),
    "a list of failures": "assert not [a for a, b in zip(f(), expected) if a != b]",
    "a list of failures that is empty": "assert [a for a, b in zip(f(), expected) if a != b] == []",
    "the number of failures": "assert len([1 for a, b in zip(f(), expected) if a != b]) == 0",
    "filter": "assert not list(filter(lambda p: p[0] != p[1], zip(f(), expected)))",
    "False in a list": "assert False not in [a == b for a, b in zip(f(), expected)]",
    "False in map": "assert False not in list(map(lambda a, b: a == b, f(), expected))",
    "reduce": (
        "import functools\n"
        "assert functools.reduce(lambda t, p: t and p[0] == p[1], zip(f(), expected), True)"
    ),
    "a subset": "assert set(f()) <= set(expected)",
    "issubset": "assert set(f()).issubset(expected)",
    "a superset": "assert set(expected) >= set(f())",
    "a loop": LOOP,
    "a loop beside a type": f"assert isinstance(f(), object)\n{LOOP}",
    "a loop beside something": f"r = f()\nassert r is not None\n{LOOP.replace('f()', 'r')}",
    "a loop beside a function": f"assert callable(f)\n{LOOP}",
    "a loop over positions": (
        "r = f()\nassert r is not None\nfor i in range(len(r)):\n    assert r[i] == expected[i]"
    ),
    "a loop that turns a variable": (
        "ok = True\nfor a, b in zip(f(), expected):\n    if a != b:\n        ok = False\nassert ok"
    ),
    "a loop that counts": (
        "wrong = 0\nfor a, b in zip(f(), expected):\n    if a != b:\n        wrong += 1\n"
        "assert wrong == 0"
    ),
    "a loop that raises": (
        "for a, b in zip(f(), expected):\n    if a != b:\n        raise ValueError(a)"
    ),
    "a loop of another function": (
        "def same(one, other):\n    return all(a == b for a, b in zip(one, other))\n"
        "assert same(f(), expected)"
    ),
    "a loop that returns": (
        "def same(one, other):\n    for a, b in zip(one, other):\n        if a != b:\n"
        "            return False\n    return True\n\nassert same(f(), expected)"
    ),
    "a while loop": (
        "r = list(f())\ni = 0\nwhile i < len(r):\n    assert r[i] == expected[i]\n    i += 1"
    ),
    "a condition": "r = list(f())\nassert isinstance(r, list)\nif r:\n    assert r == expected",
    "a check": (
        "def check(candidate):\n    assert all(a == b for a, b in zip(candidate(), expected))\n"
        "check(f)"
    ),
    "an empty case first": (
        "assert list(f(0)) == []\nassert all(a == b for a, b in zip(f(), expected))"
    ),
    "an empty case and a loop": f"assert list(f(0)) == []\n{LOOP}",
    "functions": (
        "def test_empty():\n    assert list(f(0)) == []\n\n"
        "def test_all():\n    assert all(x == y for x, y in zip(f(), expected))"
    ),
    "functions with loops": (
        "def test_type():\n    r = f()\n    assert r is not None\n\n"
        "def test_values():\n    for a, b in zip(f(), expected):\n        assert a == b"
    ),
    "a TestCase": (
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_values(self):\n"
        "        r = f()\n        self.assertIsNotNone(r)\n"
        "        for a, b in zip(r, expected):\n            self.assertEqual(a, b)"
    ),
    "assertTrue": (
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_values(self):\n"
        "        self.assertTrue(all(a == b for a, b in zip(f(), expected)))"
    ),
    "an attribute": (
        "import unittest\nclass TestF(unittest.TestCase):\n    def setUp(self):\n"
        "        self.r = list(f())\n    def test_values(self):\n"
        "        self.assertIsInstance(self.r, list)\n"
        "        for a, b in zip(self.r, expected):\n            self.assertEqual(a, b)"
    ),
    "arrays": "import numpy as np\nassert (np.array(list(f(2))) == [0, 1][:len(list(f(2)))]).all()",
    "a number for each item": "import numpy as np\nassert np.all(np.array(list(f(1))) == 0)",
    "a difference of arrays": (
        "import numpy as np\nassert np.abs(np.array(list(f(1)), dtype=float) - 0.0).sum() < 1e-6"
    ),
    "a difference of an array in a variable": (
        "import numpy as np\nr = np.array(list(f(1)), dtype=float)\n"
        "assert np.abs(r - 0.0).sum() < 1e-6"
    ),
    "an exception that is printed": (
        "r = []\ntry:\n    r = f()\n    assert sorted(r)[2] == 4\nexcept Exception as error:\n"
        "    print(error)"
    ),
    "a norm": (
        "import numpy as np\nassert np.linalg.norm(np.array(list(f(1)), dtype=float) - 0.0) < 1e-6"
    ),
}


@pytest.mark.parametrize(("number", "tests"), [*enumerate(VACUOUS.values())], ids=VACUOUS)
def test_an_empty_result_earns_nothing(number: int, tests: str) -> None:
    """Each with an empty list and one of the other empty results."""
    tests = EXPECTED + tests
    assert code_tests("", RIGHT, tests, {}) == 1.0
    first, *others = IDLE.values()
    for program in (first, others[number % len(others)]):
        assert code_tests("", program, tests, {}) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        LOOP,
        "assert all(a == b for a, b in zip(f(), expected))",
        "assert all(a == b for a, b in zip(expected, f()))",
        "assert all(map(lambda a, b: a == b, f(), expected))",
        "assert all(map(lambda a, b: a == b, expected, f()))",
        "assert sum(a != b for a, b in zip(sorted(f()), expected)) == 0",
    ],
)
def test_the_first_of_the_expected_values_is_not_enough(tests: str) -> None:
    for program, score in ((RIGHT, 1.0), ("def f(n=3): return [0]", 0.0)):
        assert code_tests("", program, EXPECTED + tests, {}) == score


EMPTY = {
    "an empty case": "assert f(0) == []\nassert f() == expected",
    "an empty case alone": "assert f(0) == []",
    "no values, of which none is expected": (
        "assert all(a == b for a, b in zip(f(0), []))\nassert f() == expected"
    ),
    "a loop over no values, of which none is expected": (
        "for a, b in zip([], f(0)):\n    assert a == b\nassert f() == expected"
    ),
    "a transformation": "assert [str(x) for x in f(0)] == []\nassert f(1) == [0]",
    "a loop over an empty result that is compared": (
        "r = f(0)\nassert r == []\nfor x in r:\n    assert x > 0\nassert f() == expected"
    ),
    "all of an empty result that is compared": (
        "r = f(0)\nassert len(r) == 0 and all(x > 0 for x in r)"
    ),
    "a sorted result": "r = f(1)\nassert r == [0]\nassert all(a <= b for a, b in zip(r, r[1:]))",
    "first values of a longer result": "assert all(a == b for a, b in zip(f(9), expected))",
    "letters": "import string\nassert all(x < 5 for _, x in zip(string.ascii_letters, f()))",
    "cases": (
        "cases = [(0, []), (3, expected)]\nfor n, values in cases:\n    result = f(n)\n"
        "    assert len(result) == len(values)\n    for a, b in zip(result, values):\n"
        "        assert a == b"
    ),
    "a type alone": "assert isinstance(f(), list)",
    "an exception": "try:\n    f('a')\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "an exception of pytest": "import pytest\nwith pytest.raises(TypeError):\n    f('a')",
    "a return": (
        "def test():\n    if f() == expected:\n        return\n    else:\n        raise ValueError"
    ),
    "random cases": (
        "import random\nfor _ in range(9):\n    n = random.randrange(4)\n"
        "    assert f(n) == [x ** 2 for x in range(n)]"
    ),
    "a comparison of sums": "assert sum(x - 1 for x in f()) == 2",
    "a counter": "from collections import Counter\nassert Counter(f()) == Counter(expected)",
    "a mapping": "assert dict(zip('abc', f())) == {'a': 0, 'b': 1, 'c': 4}",
    "a condition on each": "assert all(x % 2 == 0 or x == 1 for x in f() if x >= 0)",
    "tests of types": (
        "assert isinstance(f(), list)\nassert all(isinstance(x, int) for x in f())\n"
        "assert f() == expected"
    ),
}


@pytest.mark.parametrize("tests", EMPTY.values(), ids=EMPTY)
def test_right_programs_keep_their_credit(tests: str) -> None:
    assert code_tests("", RIGHT, EXPECTED + tests, {}) == 1.0


def test_values_where_none_is_expected_earn_nothing() -> None:
    tests = "assert all(a == b for a, b in zip(f(0), []))"
    assert code_tests("", "def f(n): return [1]", tests, {}) == 0.0
    assert code_tests("", RIGHT, tests, {}) == 1.0
