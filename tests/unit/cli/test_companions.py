"""Tests of companions of runs on one machine, which packages provide."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from services.cli.companions import CompanionArgs, companions
from tests.helpers.packages import install

COMPANION = """
from contextlib import asynccontextmanager

log = []

@asynccontextmanager
async def accompany(args):
    log.append(args.run_id)
    yield
    log.append("end")
"""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompanionArgs:
    (tmp_path / "their_companion.py").write_text(COMPANION)
    references = {"name": "their_companion:accompany", "labels": "no_such_module:accompany"}
    install(tmp_path, monkeypatch, entry_points={"slipstream.run_companions": references})
    return CompanionArgs(
        api=None,  # type: ignore[arg-type]
        url="",
        token="",
        state_directory=tmp_path,
        console=Console(file=io.StringIO(), width=300),
        run_id="run_1",
    )


async def test_a_companion_works_while_a_run_with_its_key_does(args: CompanionArgs) -> None:
    async with companions(args, spec=SimpleNamespace(name="sort4")):  # type: ignore[arg-type]
        import their_companion

        assert their_companion.log == ["run_1"]
    assert their_companion.log == ["run_1", "end"]
    async with companions(args, spec=SimpleNamespace(name="")):  # type: ignore[arg-type]
        assert their_companion.log == ["run_1", "end"]


async def test_a_companion_that_cannot_be_loaded_is_named_and_left_out(args: CompanionArgs) -> None:
    spec = SimpleNamespace(labels={"a": "b"})
    async with companions(args, spec=spec):  # type: ignore[arg-type]
        assert "labels cannot be used" in args.console.file.getvalue()  # type: ignore[attr-defined]
        assert "no_such_module" in args.console.file.getvalue()  # type: ignore[attr-defined]
