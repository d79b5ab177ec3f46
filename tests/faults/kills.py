"""A training run whose processes are killed at random."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults.training import processes_of
from tests.helpers.cli import SORT4, command, environment
from tests.helpers.ledger_check import check_run

KILLS_PER_RUN = 12

VICTIMS = ("controller", "rollout-0", "rollout-1", "trainer", "transferqueue")


def kill_at_random(
    process: subprocess.Popen, chooser: random.Random, kills: int, victims: Sequence[str] = VICTIMS
) -> list[str]:
    """Kill services while the command runs; returns who was killed."""
    killed: list[str] = []
    root = psutil.Process(process.pid)
    while process.poll() is None and "controller" not in processes_of(root):
        time.sleep(0.2)
    while process.poll() is None and len(killed) < kills:
        time.sleep(chooser.uniform(1.0, 8.0))
        name = chooser.choice(victims)
        victim = processes_of(root).get(name) if root.is_running() else None
        if victim is not None and victim.is_running():
            killed.append(name)
            victim.kill()
    return killed


def run_and_kill(
    folder: Path,
    seed: int,
    *changes: str,
    kills: int = KILLS_PER_RUN,
    steps: int = 80,
    victims: Sequence[str] = VICTIMS,
) -> dict[str, Any]:
    """Train sort4 in a folder while its processes are killed; returns what it went through.

    Args:
        folder: Where the run keeps its state.
        seed: Of the order and the moments of the kills.
        changes: Settings that differ from the example.
        kills: How many at most.
        steps: How long it trains.
        victims: Who may be killed.

    Raises:
        AssertionError: If the run failed or its ledger does not close.
    """
    state = folder / "runs"
    settings = (
        f"trainer.steps={steps}",
        "trainer.checkpoint.every=5",
        "limits.max_restarts=100",
        *changes,
    )
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command("run", SORT4, "--state-directory", state, *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            killed = kill_at_random(process, random.Random(seed), kills, victims)
            code = process.wait(600)
        finally:
            process.kill()
    text = (folder / "output.txt").read_text()
    assert code == 0, f"{killed}\n{text[-4000:]}"
    return {"seed": seed, "killed": dict(Counter(killed)), **check_run(state)}
