"""Bars of the structure of ``services``: size of the core, length of functions and levels of imports."""

import ast
from functools import cache
from pathlib import Path

from tests.helpers.cli import REPOSITORY

_MAX_LINES = 84_000
_MAX_MODULES = 350
_MAX_FUNCTION_LINES = 81
"""Header and up to 80 lines."""
_MAX_LEVELS = 8
"""Import levels of one folder."""
_LEVELS_WITH_SUBFOLDERS = {
    "controller": 22,
    "trainer": 13,
    "common": 13,
    "rollout": 10,
    "transferqueue": 9,
}
"""Import levels of packages that exceed ``_MAX_LEVELS`` when their subfolders count as one package.

The controller is composed in this order: API, manager, life cycle, pipeline, steps, weights, store. A lower
number would merge modules that are read apart. The figures are those reached; lower them, never raise them.
"""
_SERVICES = REPOSITORY / "services"
_SOURCES = {path: path.read_text() for path in _SERVICES.rglob("*.py")}
_CORE = {path: text for path, text in _SOURCES.items() if _SERVICES / "extras" not in path.parents}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_SOURCES[path])


def test_the_core_keeps_its_size():
    lines = sum(text.count("\n") for text in _CORE.values())
    modules = sum(path.name != "__init__.py" for path in _CORE)
    assert lines <= _MAX_LINES, "move what only some runs use to services/extras/"
    assert modules <= _MAX_MODULES


def test_every_function_fits_a_screen():
    long = {
        f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}": length
        for path in _SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > _MAX_FUNCTION_LINES
    }
    assert long == {}, "divide it by subject"


def _name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


_MODULES = {_name(path): path for path in _SOURCES}


@cache
def _imports(module: str) -> frozenset[str]:
    """Returns the modules of ``services`` that a module imports as it is imported."""
    statements, names = list(_tree(_MODULES[module]).body), set[str]()
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            statements += statement.orelse
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            package = statement.module
            names |= {package, *(f"{package}.{alias.name}" for alias in statement.names)}
        elif isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            children = ast.iter_child_nodes(statement)
            statements += [child for child in children if isinstance(child, ast.stmt)]
    return frozenset(names & _MODULES.keys() - {module})


def _longest_chain(modules: frozenset[str]) -> list[str]:
    """Returns the longest chain of modules of which each imports the next; its length are the levels."""

    @cache
    def chain(module: str) -> list[str]:
        chains = [chain(target) for target in sorted(_imports(module) & modules)]
        return [module, *max(chains, key=len, default=[])]

    return max(map(chain, sorted(modules)), key=len)


def test_a_folder_has_few_import_levels():
    chains = {
        folder: _longest_chain(
            frozenset(name for name in _MODULES if _MODULES[name].parent == folder)
        )
        for folder in {path.parent for path in _SOURCES}
    }
    deep = {str(folder): chain for folder, chain in chains.items() if len(chain) > _MAX_LEVELS}
    assert deep == {}, "move a definition to the module that it belongs to"


def test_a_package_with_its_subfolders_keeps_its_import_levels():
    levels: dict[str, int] = {}
    for folder in [*_SERVICES.iterdir(), *(_SERVICES / "extras").iterdir()]:
        modules = frozenset(name for name, path in _MODULES.items() if folder in path.parents)
        if modules and folder.name != "extras":
            levels[folder.name] = len(_longest_chain(modules))
    deep = {name: count for name, count in levels.items() if count > _MAX_LEVELS}
    assert deep == _LEVELS_WITH_SUBFOLDERS
