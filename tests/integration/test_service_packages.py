"""Every service starts with only the packages that its image has."""

import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Imports a service as if the packages in ``absent`` were not installed.
_WITHOUT = """
import importlib, sys
class Here:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *where):
        return None if name in absent else self._finder.find_spec(name, *where)
sys.meta_path = [Here(finder) for finder in sys.meta_path]
importlib.import_module("services.%s.__main__")
"""


@pytest.mark.parametrize("service", ["controller", "transferqueue", "rollout", "trainer"])
def test_a_service_imports_nothing_that_its_extra_does_not_install(service: str) -> None:
    installed = _installed_by(Requirement(f"slipstream[{service}]"))
    absent = {
        name
        for name, distributions in _distributions().items()
        if not {_normal(distribution) for distribution in distributions} & installed
    }
    program = f"absent = {absent!r}\n{_WITHOUT % service}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=_ROOT
    )
    assert done.returncode == 0, f"its extra in pyproject.toml lacks a package:\n{done.stderr}"


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Returns the distributions of each importable package, from the lists of all installed files."""
    return packages_distributions()


def _installed_by(requirement: Requirement) -> set[str]:
    """Returns the names of all distributions that a requirement installs."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = [requirement]
    while todo:
        each = todo.pop()
        if str(each) in seen:
            continue
        seen.add(str(each))
        found.add(_normal(each.name))
        extras = each.extras or {""}
        todo += [
            one
            for one in _needs(each)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return found


def _needs(requirement: Requirement) -> list[Requirement]:
    if requirement.name == "slipstream":
        extras = _PROJECT["optional-dependencies"]
        lines = [*_PROJECT["dependencies"], *(one for e in requirement.extras for one in extras[e])]
        return [Requirement(line) for line in lines]
    try:
        return [Requirement(line) for line in requires(requirement.name) or ()]
    except PackageNotFoundError:
        return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
