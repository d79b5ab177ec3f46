"""The judge's process: runs tests, whose code and expected results the program under test never has."""

import ast
import builtins
import functools
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any, Final

from services.extras.code_tests.judging.checks import NAME, instrumented
from services.extras.code_tests.judging.peer import Peer, PeerEndedError, Remote
from services.extras.code_tests.judging.source import (
    LAST_LINE,
    MODULES,
    builtin_under_test,
    free_names,
)

_GUARDED: Final = "__is_guarded__"
_PRECISION: Final = 1e-9


class UnjudgedError(Exception):
    """The test itself is wrong: it checks nothing, or cannot run."""


class Judge:
    """Runs tests of a program.

    Args:
        reader: Descriptor of the pipe from the program.
        writer: Descriptor of the pipe to the program.
        prelude: Code of the prompt, such as imports and classes of arguments.
        seconds: Max wall time of one test that the program takes to answer.
    """

    def __init__(self, reader: int, writer: int, *, prelude: str, seconds: float) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._peer = Peer(reader, writer, names=self._names, module="__main__")
        self._prelude = prelude
        self._seconds = seconds

    def verdict(self, test: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a test.

        Returns:
            ``passed``: one or two readings of the test; ``ended`` if the program can take no further one,
            and ``started`` if it answered before; ``unjudged``: why the test judges no program.
        """
        self._peer.patience_s = self._seconds
        try:
            if "code" in test:
                return {"passed": [self._passes_code(test)]}
            return {"passed": self._passes_call(test)}
        except PeerEndedError:
            return {"passed": [False], "ended": True, "started": self._peer.num_answers > 0}
        except UnjudgedError as error:
            return {"passed": [False], "unjudged": str(error)}
        except BaseException:  # noqa: BLE001 -- whatever a test raises, the program has not passed it
            return {"passed": [False]}

    def _passes_call(self, test: Mapping[str, Any]) -> list[bool]:
        """Returns whether the result equals the expected one, and whether it equals the only item of that."""
        function = named_function(test["function"], self._peer)
        result = function(*test["arguments"], **test["keywords"])
        expected = test["expected"]
        is_wrapped = isinstance(expected, list) and len(expected) == 1
        return [is_equal(expected, result), is_wrapped and is_equal(expected[0], result)]

    def _passes_code(self, test: Mapping[str, Any]) -> bool:
        self._names.clear()
        self._names["__name__"] = "__main__"
        prelude = _without(self._prelude, test["entry"])
        with suppress(Exception):  # the tests may do without it
            exec(compile(prelude, "prompt.py", "exec"), self._names)  # noqa: S102 -- code of the data
        _guard_numpy(test["code"] + prelude)
        is_data_used, are_missing = self._define(test["code"])
        tree, checks = instrumented(test["code"])
        self._names[NAME] = checks
        num_before = self._peer.num_answers
        self._run(test, compile(tree, "tests.py", "exec"))
        is_consulted = is_data_used or self._peer.num_answers > num_before
        if not is_consulted and not (are_missing and checks.number):
            raise UnjudgedError("it ends without a check of the program")
        return is_consulted and checks.number > 0 and checks.verify()

    def _run(self, test: Mapping[str, Any], code: CodeType) -> None:
        try:
            exec(code, self._names)  # noqa: S102 -- the purpose of this process
            if test["entry"]:
                self._names["check"](named_function(test["entry"], self._peer))
            _run_functions(self._names, test["functions"])
            _run_cases(self._names, test["cases"])
        except ModuleNotFoundError as error:
            if hasattr(error, "_program_text"):  # the program's own
                raise
            raise UnjudgedError(f"it needs the module {error.name}, which is missing") from error

    def _define(self, source: str) -> tuple[bool, bool]:
        """Defines the names that only the program has.

        Returns:
            Whether one of them is data, and whether one is missing.
        """
        peer, names = self._peer, self._names
        classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        classes |= {name for name, value in names.items() if isinstance(value, type)}
        peer.classes.shared = set(peer.request("share", sorted(classes)))
        public = set(peer.request("names"))
        free = free_names(source) - names.keys()
        requested = (free | builtin_under_test(source)) & public
        values = {name: peer.request("name", name) for name in requested}
        for name in MODULES:
            sys.modules[name] = _ProgramModule(name, peer)
        names |= values
        are_data = not all(isinstance(value, Remote | type) for value in values.values())
        return are_data, bool(free - public)


def named_function(name: str, peer: Peer) -> Any:
    """Returns the program's function of a name such as ``add``, ``Solution.add`` or ``Solution().add``."""
    first, *attributes = re.sub(r"^Solution\.", "Solution().", name).split(".")
    try:
        value = peer.request("name", first.removesuffix("()"))
    except NameError:
        if attributes:
            raise
        return getattr(peer.request("name", "Solution")(), first)
    value = value() if first.endswith("()") else value
    for attribute in attributes:
        value = getattr(value, attribute.removesuffix("()"))
        value = value() if attribute.endswith("()") else value
    return value


def is_equal(expected: Any, result: Any) -> bool:
    """Compares a result with one from JSON, which has no tuples and only text as keys."""
    if isinstance(expected, list):
        return (
            isinstance(result, list | tuple)
            and len(expected) == len(result)
            and all(map(is_equal, expected, result))
        )
    if isinstance(expected, dict):
        keys = (
            {str(key): value for key, value in result.items()} if isinstance(result, dict) else {}
        )
        return (
            isinstance(result, dict)
            and expected.keys() == keys.keys()
            and all(is_equal(value, keys[key]) for key, value in expected.items())
        )
    if isinstance(expected, bool) or isinstance(result, bool | Remote):
        return type(expected) is type(result) and bool(expected == result)
    if isinstance(expected, float) and isinstance(result, int | float):
        is_nan = math.isnan(expected) and math.isnan(result)
        return is_nan or math.isclose(
            expected, result, rel_tol=_PRECISION, abs_tol=0.0 if expected else _PRECISION
        )
    return bool(expected == result)


def _guard_numpy(source: str) -> None:
    """Lets functions of numpy that compare treat nothing as unequal to something.

    They compare an empty result with a number item by item, of which there are none.
    """
    if "numpy" not in source:
        return
    import numpy  # most tests do not use it
    import numpy.testing

    for module, names in (
        (numpy, ("allclose", "isclose")),
        (numpy.testing, ("assert_allclose", "assert_almost_equal", "assert_equal")),
        (numpy.testing, ("assert_array_equal", "assert_array_almost_equal")),
    ):
        for name in names:
            compare = getattr(module, name)
            if not hasattr(compare, _GUARDED):
                setattr(module, name, _guarded(compare, numpy.size))


def _guarded(compare: Callable[..., Any], size: Callable[[Any], int]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def guarded(first: Any, second: Any, *arguments: Any, **keywords: Any) -> Any:
        if (size(first) == 0) != (size(second) == 0):
            raise AssertionError("nothing is compared with something")
        return compare(first, second, *arguments, **keywords)

    setattr(guarded, _GUARDED, True)
    return guarded


class _ProgramModule(ModuleType):
    """The program as a module that tests import names from."""

    def __init__(self, name: str, peer: Peer) -> None:
        super().__init__(name)
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [
                public_name
                for public_name in self._peer.request("names")
                if not hasattr(builtins, public_name)
            ]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._peer.request("name", name)
        except NameError as error:
            raise AttributeError(name) from error


def _run_functions(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        owner, _, method = name.rpartition(".")
        if owner:
            case = namespace[owner]()
            getattr(case, "setup_method", lambda *_: None)(*[None] * _takes_method(case))
            getattr(case, method)()
        else:
            namespace[name]()


def _takes_method(case: Any) -> bool:
    code = getattr(getattr(case, "setup_method", None), "__code__", None)
    return code is not None and code.co_argcount > 1


def _run_cases(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        # Imported here, because it is a third of the start of a judge, and few tests are such classes.
        import unittest

        suite = unittest.defaultTestLoader.loadTestsFromTestCase(namespace[name])
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        for _, text in result.errors:
            if "PeerEndedError" in text:
                raise PeerEndedError
        if result.skipped or not result.wasSuccessful():
            raise AssertionError(name)


def _without(source: str, entry: str) -> str:
    """Returns code without the function or class that the program is to define."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    head = re.split(r"\W", entry)[0]
    body = [node for node in tree.body if getattr(node, "name", None) not in (head, "Solution")]
    return ast.unparse(ast.Module(body, []))


def judge(request: Mapping[str, Any], *, reader: int, writer: int, verdicts: int) -> None:
    """Runs tests in order and writes the verdict of each as a line of JSON.

    Args:
        request: ``tests``, ``prelude``, ``seconds`` and ``stops_at_failure``.
    """
    sys.set_int_max_str_digits(0)
    court = Judge(reader, writer, prelude=request["prelude"], seconds=request["seconds"])
    with os.fdopen(verdicts, "w", buffering=1) as lines:
        for test in request["tests"]:
            verdict = court.verdict(test)
            lines.write(json.dumps(verdict) + "\n")
            if verdict.get("ended") or (request["stops_at_failure"] and not any(verdict["passed"])):
                break
        lines.write(LAST_LINE)
