"""Tests that each image installs the extras of pyproject.toml that its program imports."""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT
from tests.helpers.images import IMAGES, stage_of, target_of

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_EXTRAS: dict[str, list[str]] = _PROJECT["optional-dependencies"]
_OURS = {"services", "slipstream", "slipstream_client"}


@pytest.mark.parametrize("image", sorted(set(IMAGES) - {"trackers"}))
def test_what_a_program_imports_at_its_start_is_installed(image: str) -> None:
    extras = target_of(image)["args"]["EXTRAS"].split(",")
    command = json.loads(stage_of(image)[-1].removeprefix("CMD "))
    assert command[:3] == ["python", "-m", "services.common.start"]
    program = command[3].removeprefix("services.")
    folder = ROOT / "services" / program
    # A rollout always imports worker.py, but not when __main__.py is loaded.
    missing = _missing(folder / "__main__.py", extras) | _missing(folder / "worker.py", extras)
    assert missing == set(), f"add them to an extra that the image installs: {extras}"


@pytest.mark.parametrize("module", ["track_command", "trackers/__main__"])
def test_what_writes_to_trackers_needs_no_more_than_a_controller(module: str) -> None:
    assert _missing(ROOT / "services" / "cli" / f"{module}.py", ["controller"]) == set()


def _missing(module: Path, extras: list[str]) -> set[str]:
    """Returns the imports of a module that the given extras do not install."""
    installed = _closure(_PROJECT["dependencies"] + [f"slipstream[{','.join(extras)}]"])
    owners = _owners()
    return {
        name
        for name in _imported(module, set())
        if name not in _OURS | sys.stdlib_module_names
        and not {_normal(owner) for owner in owners.get(name, [])} & installed
    }


@cache
def _owners() -> Mapping[str, list[str]]:
    """Returns the distributions of each package, cached because reading all metadata takes a second."""
    return metadata.packages_distributions()


def _imported(path: Path, visited: set[Path]) -> Iterator[str]:
    """Yields the top-level names that loading a module imports, directly or through our own modules."""
    if path in visited or not path.exists():
        return
    visited.add(path)
    for module in _modules(path):
        yield module.partition(".")[0]
        if module.startswith("services."):
            yield from _imported(ROOT / f"{module.replace('.', '/')}.py", visited)


@cache
def _modules(path: Path) -> list[str]:
    """Returns the modules that loading a file imports, and imported names that may be modules."""
    modules = []
    for statement in _at_load(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.ImportFrom):
            modules.append(statement.module or "")
            modules += [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            modules += [alias.name for alias in statement.names]
    return modules


def _at_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports outside of functions and of ``TYPE_CHECKING`` blocks."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            yield from _at_load(statement.body + statement.orelse)


def _closure(requirements: list[str]) -> set[str]:
    """Returns the names of all distributions that pip installs for the requirements."""
    result: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = _normal(re.match(r"[\w.-]+", requirement)[0])
        if name == "slipstream":
            for extra in re.search(r"\[(.*)\]", requirement)[1].split(","):
                waiting += _EXTRAS[extra]
        elif name not in result:
            result.add(name)
            waiting += _requirements(name)
    return result


@cache
def _requirements(name: str) -> list[str]:
    """Returns the requirements of a distribution without extras, cached because images share most of them."""
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # a requirement of another platform
    return [requirement for requirement in requirements if "extra ==" not in requirement]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
