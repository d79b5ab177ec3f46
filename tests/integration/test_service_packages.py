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
class FilteredFinder:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *where):
        return None if name in absent else self._finder.find_spec(name, *where)
sys.meta_path = [FilteredFinder(finder) for finder in sys.meta_path]
importlib.import_module("%s")
"""
_SERVICES = ("controller", "transferqueue", "rollout", "trainer")


@pytest.mark.parametrize(
    ("module", "extras"),
    [
        *((f"services.{service}.__main__", service) for service in _SERVICES),
        # Deletes checkpoints of deleted runs.
        ("services.extras.objects.checkpoints", "cluster,objects"),
        ("services.extras.objects.sample_records", "transferqueue,objects"),
        ("services.extras.kubernetes.launcher", "cluster"),
    ],
)
def test_a_module_imports_nothing_that_the_extras_of_its_image_do_not_install(
    module: str, extras: str
) -> None:
    installed = _installed_by(Requirement(f"slipstream[{extras}]"))
    absent = {
        name
        for name, distributions in _distributions().items()
        if not {_normal(distribution) for distribution in distributions} & installed
    }
    program = f"absent = {absent!r}\n{_WITHOUT % module}"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=_ROOT
    )
    assert process.returncode == 0, (
        f"its extra in pyproject.toml lacks a package:\n{process.stderr}"
    )


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Returns the distributions of each importable package, from the lists of all installed files."""
    return packages_distributions()


def _installed_by(requirement: Requirement) -> set[str]:
    """Returns the names of all distributions that a requirement installs."""
    names: set[str] = set()
    visited: set[str] = set()
    todo = [requirement]
    while todo:
        next_requirement = todo.pop()
        if str(next_requirement) in visited:
            continue
        visited.add(str(next_requirement))
        names.add(_normal(next_requirement.name))
        extras = next_requirement.extras or {""}
        todo += [
            needed
            for needed in _needs(next_requirement)
            if needed.marker is None
            or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return names


def _needs(requirement: Requirement) -> list[Requirement]:
    if requirement.name == "slipstream":
        extras = _PROJECT["optional-dependencies"]
        lines = [
            *_PROJECT["dependencies"],
            *(extra_line for e in requirement.extras for extra_line in extras[e]),
        ]
        return [Requirement(line) for line in lines]
    try:
        return [Requirement(line) for line in requires(requirement.name) or ()]
    except PackageNotFoundError:
        return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
