"""Names that the code of tests uses, and the checks in it. Pure functions."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable
from typing import Final

MODULE: Final = "solution"
"""Name of the program's module."""
MODULES: Final = (MODULE, "your_module", "submission", "program", "main")
"""Modules that tests import the program from."""
LAST_LINE: Final = "end\n"
"""Text that the judge writes after its last verdict."""
_CHECKING: Final = re.compile(r"(?i)_?(?:assert|raises|fail)")
NO_PYTHON: Final = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)
"""Errors of a text that is no Python; Python 3.11 has SystemError for some expressions that are too deep."""


def free_names(source: str) -> set[str]:
    """Returns the global names that code uses and neither it nor Python defines."""
    loaded, defined = set[str](), set[str]()

    def visit(table: symtable.SymbolTable) -> None:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if (is_module and (symbol.is_assigned() or symbol.is_imported())) or (
                symbol.is_declared_global() and symbol.is_assigned()
            ):
                defined.add(symbol.get_name())
            elif symbol.is_referenced() and (is_module or symbol.is_global()):
                loaded.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(source, "tests.py", "exec"))
    return {name for name in loaded - defined if not hasattr(builtins, name)}


def builtin_under_test(source: str) -> set[str]:
    """Returns the built-in name that the program replaces: asserts compare only its results."""
    if free_names(source):
        return set()
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    names = {_tested_name(node.test) for node in asserts}
    return {name for name in names if name} if len(names) == 1 else set()


def _tested_name(test: ast.expr) -> str:
    value = test.left if isinstance(test, ast.Compare) else test
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def _is_always_true(test: ast.expr) -> bool:
    """Returns True for ``True``, a tuple with items and ``... or True``, which no program fails."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(map(_is_always_true, test.values))
    is_constant = isinstance(test, ast.Constant) and bool(test.value)
    return is_constant or (isinstance(test, ast.Tuple) and bool(test.elts))


def is_check(node: ast.stmt) -> bool:
    """Returns True if a statement raises if the program is wrong."""
    if isinstance(node, ast.Assert):
        return not _is_always_true(node.test)
    if isinstance(node, ast.If):
        return any(isinstance(branch, ast.Raise) for branch in (*node.body, *node.orelse))
    calls: Iterable[ast.expr] = ()
    if isinstance(node, ast.Expr):
        calls = [node.value]
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
    functions = [call.func for call in calls if isinstance(call, ast.Call)]
    names = [getattr(function, "attr", getattr(function, "id", "")) for function in functions]
    return any(_CHECKING.match(name) for name in names)
