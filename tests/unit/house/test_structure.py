"""Bars of the structure of ``services``: size of the core and length of its functions."""

import ast

from tests.helpers.cli import REPOSITORY

_MAX_LINES = 84_000
_MAX_MODULES = 350
_MAX_FUNCTION_LINES = 81
"""Header and up to 80 lines."""
_SERVICES = REPOSITORY / "services"
_SOURCES = {path: path.read_text() for path in _SERVICES.rglob("*.py")}
_CORE = {path: text for path, text in _SOURCES.items() if _SERVICES / "extras" not in path.parents}


def test_the_core_keeps_its_size():
    lines = sum(text.count("\n") for text in _CORE.values())
    modules = sum(path.name != "__init__.py" for path in _CORE)
    assert lines <= _MAX_LINES, "move what only some runs use to services/extras/"
    assert modules <= _MAX_MODULES


def test_every_function_fits_a_screen():
    long = {
        f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}": length
        for path, text in _SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > _MAX_FUNCTION_LINES
    }
    assert long == {}, "divide it by subject"
