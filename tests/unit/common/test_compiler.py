"""Tests of the search for the C compiler that GPU kernels need."""

from pathlib import Path

import pytest

from services.common.host import missing_compiler


def test_any_of_gcc_and_clang_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "none was found; install gcc" in missing_compiler()
    (tmp_path / "clang").touch(mode=0o755)
    assert missing_compiler() == ""


def test_the_compiler_in_cc_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "icc")
    assert "'icc'" in missing_compiler()
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    assert missing_compiler() == ""
