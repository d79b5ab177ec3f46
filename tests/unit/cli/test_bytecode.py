"""Tests of the compilation of packages that were installed without bytecode."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli import local

_PROGRAM = """
import json, os, sys
from services.cli import local
local._LARGE_PACKAGES = ("a_package", "a_missing_package")
local.write_bytecode()
print(json.dumps([sys.dont_write_bytecode, os.environ.get("PYTHONDONTWRITEBYTECODE")]))
"""


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_it_is_written_only_if_it_is_missing(tmp_path: Path, has_bytecode: bool) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    if has_bytecode:
        subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"HOME": str(tmp_path), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
    )
    assert json.loads(result.stdout) == ([True, "1"] if has_bytecode else [False, None])


def test_bytecode_in_a_folder_that_cannot_be_read_is_no_error(monkeypatch) -> None:
    spec = SimpleNamespace(cached="/" + "x" * 300)
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    local.write_bytecode()
    assert not sys.dont_write_bytecode
