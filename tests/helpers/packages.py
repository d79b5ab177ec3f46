"""Packages that a test installs: modules and the entry points of an installed distribution."""

import tomllib
from collections.abc import Mapping
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.common import doors


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    entry_points: Mapping[str, Mapping[str, str]],
    name: str = "slipstream-test-package",
    version: str = "1.2",
) -> None:
    """Makes a folder with modules an installed distribution, for this process and those that it starts.

    Args:
        entry_points: ``module:object`` by group and name.
    """
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = ConfigParser()
    groups.read_dict(entry_points)
    with (metadata / "entry_points.txt").open("w") as file:
        groups.write(file)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.setattr(doors, "providers", cache(doors.providers.__wrapped__))


def install_role(
    folder: Path, monkeypatch: pytest.MonkeyPatch, role: str, **properties: Any
) -> None:
    """Installs a package with a kind of worker.

    Args:
        **properties: Fields of ``WorkerKind`` as literals of Python.
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in properties.items())
    source = "from services.common.runspec.workers import WorkerKind\n\n"
    (folder / f"kind_of_{role}.py").write_text(f"{source}KIND = WorkerKind({arguments})\n")
    reference = f"kind_of_{role}:KIND"
    install(folder, monkeypatch, entry_points={"slipstream.worker_roles": {role: reference}})


def install_from(
    declaration: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "slipstream-test-package"
) -> None:
    """Installs the folder of a ``pyproject.toml`` with the entry points that it declares."""
    project = tomllib.loads(declaration.read_text())["project"]
    install(declaration.parent, monkeypatch, entry_points=project["entry-points"], name=name)
