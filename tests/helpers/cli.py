"""Runs the command line as a user does."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SORT4 = REPOSITORY / "examples" / "sort4.yaml"


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that ``--json`` names in its last line."""
        return json.loads(Path(self.out.splitlines()[-1]).read_text())

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out.splitlines()[-1]).parent


def command(*arguments: str | Path) -> list[str]:
    """The slipstream command with arguments."""
    return [sys.executable, "-m", "services.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread for each process, so that several fit on two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def slipstream(*arguments: str | Path, timeout: float = 300) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=REPOSITORY,
        env=environment(),
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def train(spec: Path, state_directory: Path, *overrides: str, timeout: float = 600) -> Finished:
    """Train a specification to its end."""
    settings = [part for override in overrides for part in ("--set", override)]
    return slipstream(
        "run", spec, "--json", "--state-directory", state_directory, *settings, timeout=timeout
    )
