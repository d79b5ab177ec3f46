"""Reads the tests of a program in the forms of public data sets. Pure functions."""

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from services.extras.code_tests.judging.source import (
    MODULES,
    NO_PYTHON,
    builtin_under_test,
    free_names,
    is_check,
)

_FORMS: Final = (
    "code_tests needs tests as the answer: Python code with asserts (also a list of them, a check(candidate) "
    "with its entry_point, test functions, a TestCase), or inputs and outputs, as a mapping, a list of "
    "mappings or their JSON text, with fn_name if they call a function; "
)
_CASES: Final = ("test_cases", "tests", "official_tests", "input_output", "examples")
_SETS: Final = (
    *("public_tests", "private_tests", "generated_tests"),
    *("public_test_cases", "private_test_cases"),
)
_CODE: Final = (
    *("test_code", "test", "test_list", "asserts"),
    *("unit_tests", "assert_case", "functional"),
)
_SET_UP: Final = ("test_imports", "test_setup_code", "setup_code")
_OTHER_NAMES: Final = {
    "stdin": "input",
    "stdout": "output",
    "expected_output": "output",
    "expected": "output",
}
_FUNCTION: Final = ("fn_name", "func_name", "entry_point", "function_name")
_FUNCTIONAL: Final = ("functional", "function_call", "call_based")
_OF_PROCESS: Final = (
    *("redirect_stdout", "redirect_stderr", "capsys", "capfd", "caplog", "monkeypatch", "patch"),
    *("run_until_complete", "IsolatedAsyncioTestCase", "asyncio"),
)
_STREAMS: Final = (
    *("sys.stdin", "sys.stdout", "sys.stderr", "sys.argv"),
    *("builtins.input", "builtins.print", "builtins.open", "input", "print"),
)
_ASSIGNMENT: Final = re.compile(r"\s*[A-Za-z_]\w*\s*=(?!=)")
_JSON_NAMES: Final = {"null": None, "true": True, "false": False}
_LEETCODE: Final = """\
from typing import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from bisect import *
import bisect, collections, functools, heapq, itertools, math, re, string
"""
"""Names that LeetCode gives to every program."""


@dataclass(frozen=True, slots=True)
class OutputTests:
    """Standard input and expected standard output of a program."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class JudgedTests:
    """Tests that use the names of a program."""

    tests: tuple[Mapping[str, Any], ...]
    """Tests of :class:`services.extras.code_tests.judging.judge.Judge`."""
    preamble: tuple[str, ...] = field(default=())
    """Code that runs before the program: names that the prompt or the site defines."""
    prelude: str = ""
    """Code that runs before the tests."""


Tests = OutputTests | JudgedTests


def read_tests(answer: Any, row: Mapping[str, Any]) -> Tests:
    """Reads the tests of a row.

    Raises:
        ValueError: If the answer is in no form whose tests can run, or its tests judge no program.
    """
    value = _parsed(answer)
    if isinstance(value, str):
        return _code([value], row)
    if isinstance(value, Mapping):
        return _mapping(value, row)
    if isinstance(value, Sequence) and value:
        items = [_parsed(item) for item in value]
        if all(isinstance(item, str) for item in items):
            return _code(items, row)
        if all(isinstance(item, Mapping) for item in items):
            return _cases(items, row)
    raise _refused(f"got {_named(answer)}")


def _refused(reason: str) -> ValueError:
    return ValueError(_FORMS + reason)


def _named(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value)) or 'nothing'}"
    return f"{type(value).__name__} {value!r:.80}"


def _parsed(value: Any) -> Any:
    """Returns the list or mapping that a text describes, as JSON or as Python prints it; others as is."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            value = value.decode()
    if isinstance(value, str):
        value = _decoded(value).removeprefix("\ufeff")
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(value.strip())
            except NO_PYTHON:
                continue
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else value


def _decoded(text: str) -> str:
    """Returns the text that a text describes as JSON: some sets encode their tests twice."""
    if text.lstrip().startswith('"'):
        with suppress(ValueError, RecursionError):
            inner = json.loads(text)
            return inner if isinstance(inner, str) else text
    return text


def _mapping(answer: Mapping[str, Any], row: Mapping[str, Any]) -> Tests:
    language = str(answer.get("language") or "python").casefold()
    if not language.startswith("py"):
        raise _refused(f"got tests of a program in {language}")
    row = {**row, **{key: answer[key] for key in (*_FUNCTION, *_SET_UP) if answer.get(key)}}
    for key in _CASES:
        if answer.get(key):
            return read_tests(answer[key], row)
    for key in _CODE:
        if answer.get(key):
            code = _parsed(answer[key])
            prefix = str(answer.get("import_prefix") or "")
            return _code(list(code) if isinstance(code, list) else [code], row, preamble=prefix)
    sets = [_parsed(answer[key]) for key in _SETS if answer.get(key)]
    pairs = [pair for test_set in sets or [answer] for pair in _pairs(test_set, row)]
    return _tests_of(pairs, row)


def _cases(items: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Tests:
    if any(key in item for item in items for key in ("inputs", "outputs")):
        return _tests_of([pair for item in items for pair in _pairs(item, row)], row)
    return _tests_of([_renamed(item) for item in items], row)


def _renamed(test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a test with ``input`` and ``output`` in the place of names such as ``stdin``."""
    names = {old: new for old, new in _OTHER_NAMES.items() if old in test and new not in test}
    return {names.get(key, key): value for key, value in test.items()}


def _pairs(answer: Any, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields ``input``, ``output`` and the other keys of each test."""
    if not isinstance(answer, Mapping):
        raise _refused(f"got {_named(answer)}")
    answer = _renamed(answer)
    plural = "inputs" in answer or "outputs" in answer
    names = ("inputs", "outputs") if plural else ("input", "output")
    if not set(names) <= answer.keys():
        raise _refused(f"got {_named(answer)}")
    inputs, outputs = (_parsed(answer[name]) for name in names)
    shared = {key: value for key, value in answer.items() if key not in names}
    are_lists = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
    if not plural and (not are_lists or _function_name(answer)):
        yield {**shared, "input": answer["input"], "output": answer["output"]}
        return
    if not are_lists or len(inputs) != len(outputs):
        raise _refused(f"got {_counted(inputs)} inputs and {_counted(outputs)} outputs")
    for input_text, output in zip(inputs, outputs, strict=True):
        yield {**shared, "input": input_text, "output": output}


def _counted(values: Any) -> str:
    return (
        str(len(values)) if isinstance(values, list | tuple) else f"no list ({_named(values)}) of"
    )


def _tests_of(cases: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Tests:
    if not cases:
        raise _refused("got no tests")
    for case in cases:
        if not {"input", "output"} <= case.keys():
            raise _refused(f"got a test that is {_named(case)}")
    names = [_function_name(case) or _function_of(case, row) for case in cases]
    if not any(names):
        pairs = tuple((_text(case["input"]), _text(case["output"])) for case in cases)
        if not any(output.strip() for _, output in pairs):
            raise _refused("got no test with output, which a program that does nothing passes")
        return OutputTests(pairs)
    if not all(names):
        raise _refused("got tests with and without a function's name")
    tests = [_call(name, case) for name, case in zip(names, cases, strict=True)]
    if all(test["expected"] in (None, [None]) for test in tests):
        raise _refused(
            "got only tests whose result is None, which a function that does nothing passes"
        )
    prelude = _prelude(row)
    return JudgedTests(tuple(tests), (_LEETCODE, *_program_prelude(row)), prelude)


def _function_name(names: Mapping[str, Any]) -> str:
    metadata = _parsed(names.get("metadata"))
    for source in (names, metadata if isinstance(metadata, Mapping) else {}):
        for key in _FUNCTION:
            if isinstance(name := source.get(key), str) and name.strip():
                return name.strip()
    return ""


def _function_of(case: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Returns the name of the function that a test without a name calls; nothing if it calls none."""
    kind = case.get("testtype", case.get("type", ""))
    if kind and kind not in _FUNCTIONAL:
        return ""
    name = _function_name(row)
    if kind and not name:
        raise _refused(f"got tests of the type {kind} without the function's name, fn_name")
    return name


def _text(value: Any) -> str:
    """Returns standard input or output: a text, a number or a list of lines."""
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise _refused(f"got {_named(value)} as standard input or output; name the function, fn_name")


def _call(function: str, case: Mapping[str, Any]) -> dict[str, Any]:
    inputs, output = case["input"], case["output"]
    arguments: Sequence[Any] = []
    keywords: Mapping[str, Any] = {}
    if isinstance(inputs, Mapping):
        keywords = inputs
    elif isinstance(inputs, list | tuple):
        arguments = inputs
    elif isinstance(inputs, str):
        arguments, keywords = _written_arguments(inputs)
    else:
        arguments = [inputs]
    return {
        "function": function,
        "arguments": [*arguments],
        "keywords": dict(keywords),
        "expected": _value(output)
        if isinstance(output, str) and isinstance(inputs, str)
        else output,
    }


def _written_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Reads arguments such as ``nums = [3, 3], target = 6``, or one in JSON on each line."""
    if _ASSIGNMENT.match(text):
        try:
            call = ast.parse(f"f({text.strip()})", mode="eval").body
            assert isinstance(call, ast.Call)
            positional = [_literal(node) for node in call.args]
            return positional, {
                str(argument.arg): _literal(argument.value) for argument in call.keywords
            }
        except NO_PYTHON as error:
            raise _refused(f"got the arguments {text!r:.80}, which are no values") from error
    return [_value(line) for line in text.splitlines() if line.strip()], {}


def _literal(node: ast.expr) -> Any:
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id in _JSON_NAMES:
            text = ast.unparse(node)
            return ast.literal_eval(re.sub(r"\b(null|true|false)\b", _python_name, text))
    return ast.literal_eval(node)


def _python_name(name: re.Match[str]) -> str:
    return str(_JSON_NAMES[name[0]])


def _value(text: str) -> Any:
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
    for reader in readers:
        try:
            return reader(text.strip())
        except NO_PYTHON:
            continue
    return text


def _code(statements: Sequence[Any], row: Mapping[str, Any], *, preamble: str = "") -> JudgedTests:
    trees = [_tree(statement) for statement in statements]
    if not all(any(map(_checks, tree.body)) for tree in trees):
        trees = [ast.Module([node for tree in trees for node in tree.body], [])]
    tests = tuple(_test(tree, row) for tree in trees)
    prelude = f"{preamble}\n{_prelude(row)}"
    before = (preamble, *_program_prelude(row)) if preamble else _program_prelude(row)
    is_leetcode = any(test["entry"].startswith("Solution") for test in tests)
    return JudgedTests(tests, (_LEETCODE, *before) if is_leetcode else before, prelude)


def _tree(code: Any) -> ast.Module:
    if not isinstance(code, str) or not code.strip():
        raise _refused(f"got {_named(code)}")
    try:
        tree = ast.parse(code)
        compile(code, "tests.py", "exec")
    except NO_PYTHON as error:
        raise _refused(f"got text that is neither JSON nor Python: {code.strip()!r:.80}") from error
    return ast.Module([node for node in tree.body if not _starts_tests(node)], [])


def _starts_tests(node: ast.stmt) -> bool:
    """Returns True for ``unittest.main()`` and ``pytest.main()``, which would start other tests."""
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    mains = [child for child in calls if isinstance(child, ast.Attribute) and child.attr == "main"]
    return any(
        isinstance(m.value, ast.Name) and m.value.id in ("unittest", "pytest") for m in mains
    )


def _checks(node: ast.AST) -> bool:
    return any(isinstance(child, ast.stmt) and is_check(child) for child in ast.walk(node))


def _test(tree: ast.Module, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a test of the judge.

    Raises:
        ValueError: If the code checks nothing, or nothing of a program.
    """
    code = ast.unparse(tree)
    if not any(map(_checks, tree.body)):
        raise _refused(f"got code without a check, such as an assert: {code!r:.80}")
    entry = ""
    if _has_uncalled_check(tree):
        entry = _function_name(row)
        if not entry:
            raise _refused(
                "got check(candidate) without a call and without the function's name; keep entry_point"
            )
    uses = free_names(code) | builtin_under_test(code) | _imports_of_program(tree)
    if not (uses or entry):
        raise _refused(f"got tests that use nothing of the program: {code!r:.80}")
    functions, cases = list[str](), list[str]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_test_case(node):
            cases.append(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            functions += [
                f"{node.name}.{name}" for name in _test_functions(node.body, in_class=True)
            ]
        else:
            functions += _test_functions([node], in_class=False)
    _check_modules(tree)
    _check_reach(tree)
    return {"code": code, "entry": entry, "functions": functions, "cases": cases}


def _has_uncalled_check(tree: ast.Module) -> bool:
    heads = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"
    ]
    is_called = any(
        isinstance(child, ast.Call)
        and isinstance(child.func, ast.Name)
        and child.func.id == "check"
        for node in tree.body
        for child in ast.walk(node)
    )
    return bool(heads) and not is_called and len(heads[-1].args.args) == 1


def _imports_of_program(tree: ast.Module) -> set[str]:
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules & {*MODULES}


def _check_modules(tree: ast.Module) -> None:
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    for name in sorted(names - {*MODULES, ""}):
        if importlib.util.find_spec(name) is None:
            raise _refused(f"got tests that import {name}, which is not installed")


def _check_reach(tree: ast.Module) -> None:
    """Refuses tests that change or observe the program's process, in which they do not run."""
    for node in ast.walk(tree):
        name = str(
            getattr(node, "arg", None) or getattr(node, "attr", None) or getattr(node, "id", "")
        )
        if isinstance(node, ast.arg | ast.Attribute | ast.Name) and name in _OF_PROCESS:
            raise _refused(f"got tests that use {name}, which cannot reach the program's process")
        if isinstance(node, ast.Await):
            raise _refused("got tests that await what the program defines")
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if ast.unparse(target) in _STREAMS:
                raise _refused(f"got tests that replace {ast.unparse(target)} of the program")


def _is_test_case(node: ast.ClassDef) -> bool:
    bases = [getattr(base, "attr", getattr(base, "id", "")) for base in node.bases]
    return any(base.endswith("TestCase") for base in bases)


def _test_functions(body: Sequence[ast.stmt], *, in_class: bool) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            raise _refused(f"got the asynchronous test {node.name}")
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test")):
            continue
        arguments = node.args
        required = len(arguments.args) + len(arguments.posonlyargs) - len(arguments.defaults)
        required += sum(default is None for default in arguments.kw_defaults)
        if node.decorator_list or required > int(in_class):
            if not in_class and not node.decorator_list and not node.name.startswith("test_"):
                continue
            raise _refused(f"got the test {node.name} with fixtures or parameters of pytest")
        yield node.name


def _program_prelude(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the code of the row's prompt, which HumanEval and LeetCode sets expect before the program."""
    prompt = row.get("prompt")
    try:
        tree = ast.parse(prompt) if isinstance(prompt, str) else ast.Module([], [])
    except NO_PYTHON:
        return ()
    defining = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return (str(prompt),) if any(isinstance(node, defining) for node in tree.body) else ()


def _prelude(row: Mapping[str, Any]) -> str:
    imports = _parsed(row.get("test_imports"))
    lines = [str(line) for line in imports] if isinstance(imports, list) else []
    texts = [row.get(key) for key in ("test_setup_code", "setup_code")]
    set_up = [text for text in texts if isinstance(text, str)]
    return "\n".join([*_program_prelude(row), *lines, *set_up])
