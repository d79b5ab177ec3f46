"""Tests of observers of runs, which packages add."""

import asyncio
import sys
from pathlib import Path

import pytest

from services.controller.run.observe import observers
from services.controller.run.observe.observers import Observers
from tests.helpers.packages import install

OBSERVER = """
class Observer:
    def __init__(self, args):
        self.steps = args.steps

    def reset(self):
        self.steps.append("reset")

    def record_step(self, numbers):
        self.steps.append(numbers["step"])

    async def watch(self):
        {watch}
"""


class Args:
    def __init__(self) -> None:
        self.steps: list[object] = []


async def _ticks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that installs an observer with a body of ``watch`` and starts to watch."""
    monkeypatch.setattr(observers, "_IMPORT_AFTER_S", 0.0)

    def install_and_open(watch: str, module: str) -> tuple[Observers, Args]:
        (tmp_path / f"{module}.py").write_text(OBSERVER.format(watch=watch))
        group = {"slipstream.run_observers": {"theirs": f"{module}:Observer"}}
        install(tmp_path, monkeypatch, entry_points=group)
        args = Args()
        return Observers(args), args  # type: ignore[arg-type]

    return install_and_open


@pytest.fixture(autouse=True)
def _only_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    own_names = observers.OBSERVERS.own_names
    monkeypatch.setattr(
        type(observers.OBSERVERS),
        "items",
        lambda self: [(name, self[name]) for name in self if name not in own_names()],
    )


async def test_an_observer_gets_the_steps_before_and_after_it_was_imported(opened) -> None:
    observers_of_run, args = opened("import asyncio; await asyncio.sleep(3600)", "observer_a")
    observers_of_run.record_step({"step": 1})
    assert "observer_a" not in sys.modules
    task = asyncio.ensure_future(observers_of_run.watch())
    await _ticks()
    observers_of_run.record_step({"step": 2})
    observers_of_run.reset()
    task.cancel()
    assert args.steps == [1, 2, "reset"]


async def test_an_observer_that_fails_ends_nothing(opened) -> None:
    observers_of_run, args = opened("raise RuntimeError('theirs')", "observer_b")
    await asyncio.wait_for(observers_of_run.watch(), 10)
    observers_of_run.record_step({"step": 1})
    assert args.steps == [1]
