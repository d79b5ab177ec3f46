"""Tests of the command ``doctor``."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from tests.helpers.packages import install


def test_everything_of_slipstream_can_be_used() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for text in ("slipstream.rollout_engines", "vllm", "slipstream.rewards", "math_verify"):
        assert text in result.output


def test_what_is_broken_is_listed_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        entry_points={
            "slipstream.rollout_engines": {"broken": "no_such_module:KIND", "torch": "no:KIND"},
            "slipstream.rewards": {"absent": "no_such_module.at_all:reward"},
        },
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    broken = [line.split() for line in lines if "slipstream-test-package 1.2" in line]
    assert {words[0] for words in broken if words[1:] == ["slipstream-test-package", "1.2"]} == {
        "broken",
        "torch",
        "absent",
    }
    assert result.output.count("cannot be used") == 3
