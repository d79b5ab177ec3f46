"""Checks of a test's code that ran, so that none passes because nothing was compared.

``all(a == b for a, b in zip(result, expected))`` holds for an empty result, and a loop over one runs no
assert. The code is therefore rewritten: each check reports that it passed, and each iteration that judges
values of a program reports its items.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Final, NamedTuple

from services.extras.code_tests.judging.source import (
    MODULES,
    builtin_under_test,
    free_names,
    is_check,
)

NAME: Final = "__checks__"
"""Name of the :class:`Checks` in the rewritten code."""
_TELLING: Final = ("print", "print_exc", "debug", "info", "warning", "error", "exception", "log")
_TYPES: Final = ("isinstance", "issubclass", "callable", "hasattr")
_TYPE_METHODS: Final = ("assertIsInstance", "assertIsNotNone")
_TRUTH_METHODS: Final = ("assertTrue", "assert_", "assertFalse")
_QUANTIFIERS: Final = ("all", "any")
_TOTALS: Final = ("sum", "max", "norm", "count_nonzero", "mean", "nansum")
_MAPS: Final = ("map", "filter", "starmap", "filterfalse", "takewhile", "dropwhile", "reduce")
_COMPARING: Final = ("eq", "ne", "lt", "le", "gt", "ge", "sub", "is_", "is_not", "isclose")
_SETS: Final = ("set", "frozenset", "keys")
_ALPHABETS: Final = "ascii_"

_Names = frozenset[tuple[int, str, int]]
"""Variables: function, name and number of assignments before."""


class Check(NamedTuple):
    """Statement that fails for a wrong program."""

    is_weak: bool
    """True if it compares no value, only a type or the truth of a variable."""
    names: _Names
    """Variables that it compares."""


class Checks:
    """Checks and iterations of one test, which its rewritten code reports."""

    # No dataclass: its import is a tenth of the start of a judge, of which each program has one.
    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.iterations: list[_Names] = []
        """Variables that each iteration is about."""
        self.number = 0
        """Checks that ran."""
        self._passed, self._reached, self._evaluated = set[int](), set[int](), set[int]()
        self._has_caught = self._is_running = False

    def begin(self) -> None:
        """Counts a check that starts."""
        self.number += 1
        self._is_running = True

    def end(self, check: int) -> None:
        """Notes that a check passed."""
        self._passed.add(check)
        self._is_running = False

    def catch(self) -> None:
        """Counts an exception that the tests expect, or that they go on to judge."""
        self.number += 1
        self._is_running = False
        self._has_caught = True

    def refuse_failed(self) -> None:
        """Fails tests that catch the failure of a check and go on."""
        if self._is_running:
            raise sys.exception() or AssertionError("the tests suppress a failed check")
        self.number += 1

    def items(self, iteration: int, values: Iterable[Any]) -> Iterator[Any]:
        """Yields values and notes whether there is one."""
        self._reached.add(iteration)
        for value in values:
            self._evaluated.add(iteration)
            yield value
        if isinstance(values, _Zip) and values.are_empty:
            self._evaluated.add(iteration)

    def sized(self, iteration: int, value: Any) -> Any:
        """Returns an array or a set, and notes whether it has items."""
        self._reached.add(iteration)
        size = getattr(value, "size", None)
        if not isinstance(size, int):
            size = len(value) if hasattr(value, "__len__") else 1
        if size:
            self._evaluated.add(iteration)
        return value

    def turn(self, iteration: int, condition: Any) -> Any:
        """Returns the condition of a loop, and notes whether it holds."""
        self._reached.add(iteration)
        if condition:
            self._evaluated.add(iteration)
        return condition

    @staticmethod
    def zipped(are_expected: Sequence[bool], *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yields tuples like ``zip``.

        Args:
            are_expected: For each of the values, whether it is the tests' own.

        Raises:
            AssertionError: If the program's values end before the expected ones.
        """
        return _Zip(are_expected, values)

    @classmethod
    def mapped(cls, are_expected: Sequence[bool], function: Any, *values: Any) -> Iterator[Any]:
        """Yields results like ``map``; raises as :meth:`zipped`."""
        return (function(*row) for row in cls.zipped(are_expected, *values))

    def verify(self) -> bool:
        """Returns True if a comparison of values judged the program.

        An iteration over nothing is allowed only if a check that passed compares the same variable.
        """
        strong = [check for check in self.checks if not check.is_weak]
        passed_checks = [self.checks[number] for number in self._passed]
        compared = [check for check in passed_checks if not check.is_weak]
        if strong and not compared and not self._has_caught:
            return False
        names = frozenset[tuple[int, str, int]]().union(*(check.names for check in compared))
        return all(self.iterations[number] & names for number in self._reached - self._evaluated)


class _Zip(Iterator[tuple[Any, ...]]):
    """Tuples of :meth:`Checks.zipped`.

    Attributes:
        are_empty: True if all values are empty: the program returned nothing where nothing is expected.
    """

    def __init__(self, are_expected: Sequence[bool], values: Sequence[Any]) -> None:
        self.are_empty = all(isinstance(value, Sized) and not len(value) for value in values)
        self._rows = _rows(are_expected, values)

    def __next__(self) -> tuple[Any, ...]:
        return next(self._rows)


def _rows(are_expected: Sequence[bool], values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    iterators = [iter(value) for value in values]
    count = 0
    while True:
        row = []
        for iterator, is_expected in zip(iterators, are_expected, strict=True):
            try:
                row.append(next(iterator))
            except StopIteration:
                if not is_expected:
                    _refuse_rest(are_expected, values, count)
                return
        yield tuple(row)
        count += 1


def _refuse_rest(are_expected: Sequence[bool], values: Sequence[Any], count: int) -> None:
    for is_expected, value in zip(are_expected, values, strict=True):
        if (
            is_expected
            and isinstance(value, list | tuple | str | dict | set)
            and len(value) > count
        ):
            raise AssertionError(f"{count} of {len(value)} expected values are compared")


def instrumented(source: str) -> tuple[ast.Module, Checks]:
    """Rewrites the code of a test so that it reports its checks to ``__checks__``."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    rewriter = _Rewriter(_program_names(tree, source), modules | {"np", "numpy", "math"})
    tree = ast.fix_missing_locations(rewriter.visit(tree))
    return tree, rewriter.checks


def _program_names(tree: ast.Module, source: str) -> set[str]:
    """Returns names whose values come from the program."""
    names = free_names(source) | builtin_under_test(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.FunctionDef) and node.name == "check":
            names |= {argument.arg for argument in node.args.args}
    assigned = [pair for node in ast.walk(tree) for pair in _assigned(node)]
    previous = -1
    while len(names) != previous:
        previous = len(names)
        for targets, value in assigned:
            if _loads(value) & names:
                names |= targets
    return names


def _assigned(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    if isinstance(node, ast.Assign):
        yield set().union(*map(_stored, node.targets)), node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield _stored(node.target), node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield _stored(node.target), node.iter


def _stored(target: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {ast.unparse(node) for node in ast.walk(target) if _is_own_attribute(node)}


def _loads(value: ast.AST) -> set[str]:
    return {
        ast.unparse(node)
        for node in ast.walk(value)
        if isinstance(node, ast.Name) or _is_own_attribute(node)
    } - {"self", "cls"}


def _is_own_attribute(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def _called(node: ast.AST) -> str:
    """Returns the name of the function or method that an expression calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _has(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(child, kinds) for child in ast.walk(node))


def _compares(node: ast.AST) -> bool:
    return _has(node, (ast.Compare, ast.Not)) or any(
        _called(child) in _COMPARING for child in ast.walk(node)
    )


def _subtracts(node: ast.AST) -> bool:
    return _has(node, ast.Sub)


class _Rewriter(ast.NodeTransformer):
    """Precedes checks by counts and wraps iterations that judge.

    Args:
        program_names: Names whose values come from the program.
        modules: Names of modules.
    """

    def __init__(self, program_names: set[str], modules: set[str]) -> None:
        self.checks = Checks()
        self._program_names = program_names
        self._scopes = [0]
        self._num_scopes = 0
        self._num_assigned = defaultdict[tuple[int, str], int](int)
        self._modules = modules
        self._parameters: list[set[str]] = [set()]
        self._iterated: list[ast.expr] = []

    def visit(self, node: ast.AST) -> Any:
        """Rewrites a node and what it contains."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self._function(node)
        if isinstance(node, ast.For):
            return self._loop(node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            node.value = self.visit(node.value)
            self._assign(*(node.targets if isinstance(node, ast.Assign) else [node.target]))
            return node
        if isinstance(node, ast.stmt) and is_check(node):
            return self._reporting(node)
        if isinstance(node, ast.Try | ast.With | ast.While):
            return self._block(node)
        return self.generic_visit(self._judging(node))

    def _reporting(self, node: ast.stmt) -> list[ast.stmt]:
        """Returns a check between the reports of its start and its end."""
        condition, names = _condition(node), frozenset[tuple[int, str, int]]()
        is_weak = _called_statement(node) in _TYPE_METHODS
        if condition is not None:
            is_weak, names = _is_weak(condition), self._names_of(condition)
        num_before = len(self._iterated)
        self.generic_visit(node)
        if condition is not None and len(self._iterated) > num_before:
            names = self._names_of(*_beside(condition, self._iterated[num_before:]))
        self.checks.checks.append(Check(is_weak, names))
        end = _report("end", len(self.checks.checks) - 1)
        if isinstance(node, ast.If):  # the branch that raises nothing may return
            for branch in (node.body, node.orelse):
                if branch and not any(isinstance(line, ast.Raise) for line in branch):
                    branch.insert(0, end)
        lines: list[ast.stmt] = [_report("begin"), node, end]
        return [*lines, _report("refuse_failed")] if _suppresses(node) else lines

    def _block(self, node: ast.Try | ast.With | ast.While) -> Any:
        has_check = _contains_check(node.body)
        if isinstance(node, ast.Try):
            has_check = has_check or _contains_check(node.orelse)
        self.generic_visit(node)
        if not has_check:
            return node
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                handler.body.insert(0, _report("refuse_failed" if _swallows(handler) else "catch"))
        if isinstance(node, ast.While):
            node.test = self._wrapped("turn", node.test)
        return [node, _report("refuse_failed")] if _suppresses(node) else node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._num_scopes += 1
        self._scopes.append(self._num_scopes)
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self._parameters.append({argument.arg for argument in names})
        self.generic_visit(node)
        self._parameters.pop()
        self._scopes.pop()
        return node

    def _loop(self, node: ast.For) -> ast.AST:
        has_check = _contains_check(node.body)
        is_judging = has_check or any(
            isinstance(child, ast.If) and _compares(child.test)
            for statement in node.body
            for child in ast.walk(statement)
        )
        values = self.visit(node.iter)
        if has_check or (is_judging and self._may_be_of_program(node.iter)):
            values = self._wrapped("items", values, names=self._names_of(node.iter))
        self._assign(node.target)
        body = ast.Module([*node.body, *node.orelse], [])
        count = len(node.body)
        first = [self._statements(statement) for statement in body.body[:count]]
        last = [self._statements(statement) for statement in body.body[count:]]
        node.iter = values
        node.body = [line for lines in first for line in lines]
        node.orelse = [line for lines in last for line in lines]
        return node

    def _statements(self, node: ast.stmt) -> list[ast.stmt]:
        lines = self.visit(node)
        return lines if isinstance(lines, list) else [lines]

    def _assign(self, *targets: ast.expr) -> None:
        for target in targets:
            for name in _stored(target):
                self._num_assigned[self._scopes[-1], name] += 1

    def _names_of(self, *values: ast.AST) -> _Names:
        """Returns the variables in expressions, without functions that they call."""
        names = set[str]()
        for value in values:
            functions = {id(call.func) for call in ast.walk(value) if isinstance(call, ast.Call)}
            bound = {
                name
                for child in ast.walk(value)
                if isinstance(child, ast.comprehension)
                for name in _stored(child.target)
            }
            variables = [child for child in ast.walk(value) if id(child) not in functions]
            for child in variables:
                if isinstance(child, ast.Name) or _is_own_attribute(child):
                    names |= {ast.unparse(child)} - bound
        scope = self._scopes[-1]
        return frozenset(
            (scope, name, self._num_assigned[scope, name])
            for name in names - {"self", "cls"} - self._modules
        )

    def _is_of_program(self, value: ast.AST) -> bool:
        return bool(_loads(value) & self._program_names)

    def _may_be_of_program(self, value: ast.AST) -> bool:
        return self._is_of_program(value) or bool(_loads(value) & self._parameters[-1])

    def _wrapped(self, report: str, value: ast.expr, *, names: _Names | None = None) -> ast.expr:
        self.checks.iterations.append(self._names_of(value) if names is None else names)
        self._iterated.append(value)
        return _call(report, ast.Constant(len(self.checks.iterations) - 1), value)

    def _judging(self, node: Any) -> Any:
        """Wraps the iterations of an expression that judges values."""
        if isinstance(node, ast.Call):
            return self._judging_call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            conditions = [condition_node for step in node.generators for condition_node in step.ifs]
            if any(map(_compares, [node.elt, *conditions])):
                self._wrap_comprehension(node)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            if isinstance(node.ops[0], ast.LtE | ast.Lt) and _is_set(node.left):
                node.left = self._sized(node.left)
            elif isinstance(node.ops[0], ast.GtE | ast.Gt) and _is_set(node.comparators[0]):
                node.comparators[0] = self._sized(node.comparators[0])
        return node

    def _sized(self, value: ast.expr) -> ast.expr:
        return self._wrapped("sized", value) if self._may_be_of_program(value) else value

    def _judging_call(self, node: ast.Call) -> ast.Call:
        name, is_method = _called(node), isinstance(node.func, ast.Attribute)
        if name in _QUANTIFIERS or name in _TOTALS or name == "issubset":
            self._wrap_quantifier(node, name, is_method=is_method)
        elif name in _MAPS and len(node.args) > 1 and not _is_method_of_value(node):
            self._wrap_map(node, name)
        report = {"zip": "zipped", "map": "mapped"}.get(name)
        if report is None or is_method or node.keywords:
            return node
        flags = self._expected(node.args[1:] if name == "map" else node.args)
        return node if flags is None else _call(report, flags, *node.args)

    def _wrap_quantifier(self, node: ast.Call, name: str, *, is_method: bool) -> None:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            # A comprehension with a comparison is wrapped on its own.
            if not _compares(first) and (name in _QUANTIFIERS or _subtracts(first.elt)):
                self._wrap_comprehension(first)
        elif name in _TOTALS:
            self._wrap_difference(node)
        elif isinstance(node.func, ast.Attribute) and (first is None or name == "issubset"):
            node.func.value = self._sized(node.func.value)
        elif first is not None and self._may_be_of_program(first):
            node.args[0] = self._wrapped("sized" if is_method else "items", first)

    def _wrap_difference(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Attribute):
            return
        value = node.args[0] if node.args else node.func.value
        if not (_subtracts(value) or _compares(value)) or not self._may_be_of_program(value):
            return
        if node.args:
            node.args[0] = self._wrapped("sized", value)
        else:
            node.func.value = self._wrapped("sized", value)

    def _wrap_map(self, node: ast.Call, name: str) -> None:
        function = node.args[0]
        names = {getattr(function, "attr", getattr(function, "id", ""))}
        is_judging = _compares(function) or _subtracts(function) or bool(names & {*_COMPARING})
        if (is_judging or name.startswith("filter")) and self._may_be_of_program(node):
            indexes = [
                index
                for index, value in enumerate(node.args)
                if index and not isinstance(value, ast.Starred) and self._may_be_of_program(value)
            ]
            for index in indexes[:1]:
                node.args[index] = self._wrapped("items", node.args[index])

    def _wrap_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for step in node.generators:
            is_of_program = self._is_of_program(step.iter)
            is_of_types = _called(node.elt) in _TYPES
            if is_of_program or (self._may_be_of_program(step.iter) and not is_of_types):
                step.iter = self._wrapped("items", step.iter)

    def _expected(self, values: Sequence[ast.expr]) -> ast.expr | None:
        """Returns which values of several are the tests' own; None if none or all are."""
        are_expected = [not self._may_be_of_program(value) for value in values]
        if any(isinstance(value, ast.Starred) for value in values) or len({*are_expected}) < 2:
            return None
        is_alphabet = [ast.unparse(value).startswith(("string.", _ALPHABETS)) for value in values]
        flags = [a and not b for a, b in zip(are_expected, is_alphabet, strict=True)]
        return ast.Tuple([ast.Constant(flag) for flag in flags], ast.Load())


def _beside(condition: ast.expr, iterated: Sequence[ast.expr]) -> list[ast.expr]:
    """Returns the comparisons in a condition that are no part of an iteration and have none."""
    inner = {id(child) for value in iterated for child in ast.walk(value)}
    for child in ast.walk(condition):
        if isinstance(child, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            inner |= {id(comparison) for comparison in ast.walk(child)}
    values = {id(value) for value in iterated}
    return [
        child
        for child in ast.walk(condition)
        if isinstance(child, ast.Compare)
        and id(child) not in inner
        and not any(id(value) in values for value in ast.walk(child))
    ]


def _is_method_of_value(node: ast.Call) -> bool:
    """Returns True for a method such as ``series.map``, not for a function of a module."""
    function = node.func
    return isinstance(function, ast.Attribute) and not (
        isinstance(function.value, ast.Name) and function.value.id in ("itertools", "functools")
    )


def _condition(node: ast.stmt) -> ast.expr | None:
    """Returns what a check compares; None if it is no single expression."""
    if isinstance(node, ast.Assert | ast.If):
        return node.test
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        call = node.value
        if _called(call) in _TRUTH_METHODS:
            return call.args[0]
        if _called(call) in _TYPE_METHODS:
            return None
        return ast.Tuple(call.args, ast.Load())
    return None


def _called_statement(node: ast.stmt) -> str:
    return _called(node.value) if isinstance(node, ast.Expr) else ""


def _is_weak(condition: ast.expr) -> bool:
    """Returns True if a condition is about a type or the truth of a variable."""
    if isinstance(condition, ast.BoolOp):
        return all(map(_is_weak, condition.values))
    if isinstance(condition, ast.Compare):
        is_none = isinstance(condition.comparators[0], ast.Constant) and (
            condition.comparators[0].value is None
        )
        return (isinstance(condition.ops[0], ast.IsNot | ast.NotEq) and is_none) or (
            _called(condition.left) == "type"
        )
    return isinstance(condition, ast.Name) or _called(condition) in _TYPES


def _is_set(value: ast.expr) -> bool:
    return isinstance(value, ast.SetComp) or _called(value) in _SETS


def _call(report: str, *arguments: ast.expr) -> ast.Call:
    function = ast.Attribute(ast.Name(NAME, ast.Load()), report, ast.Load())
    return ast.Call(function, [*arguments], [])


def _report(report: str, *numbers: int) -> ast.stmt:
    return ast.Expr(_call(report, *map(ast.Constant, numbers)))


def _contains_check(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(n, ast.stmt) and is_check(n) for node in body for n in ast.walk(node))


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Returns True if a handler catches failed asserts and does no more than to print."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    catches_asserts = handler.type is None or names & {
        "AssertionError",
        "Exception",
        "BaseException",
    }
    return bool(catches_asserts) and all(map(_is_idle, handler.body))


def _is_idle(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _called(node.value) in _TELLING
    return isinstance(node, ast.Pass | ast.Continue | ast.Break)


def _suppresses(node: ast.stmt) -> bool:
    items = node.items if isinstance(node, ast.With) else []
    return any(_called(item.context_expr) == "suppress" for item in items)
