"""Runs the command line as a user does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from services.cli.state_directory import find_token
from tests.helpers.forked_command import run_forked
from tests.helpers.processes import below

REPOSITORY = Path(__file__).parents[2]
SORT4 = REPOSITORY / "examples" / "sort4.yaml"
QUEUE_BYTES = "SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES"


@dataclass(frozen=True)
class Finished:
    """Result of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that ``--json`` names in the last line."""
        return json.loads(Path(self.out.splitlines()[-1]).read_text())

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out.splitlines()[-1]).parent


def command(*arguments: str | Path) -> list[str]:
    """Returns the arguments of a slipstream command."""
    return [sys.executable, "-m", "services.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Returns an environment with one thread per process, so that several fit on two cores."""
    # The transferqueue allocates its memory at its start, by default 1 GiB, which takes a second.
    return {QUEUE_BYTES: str(128 << 20), **os.environ, "OMP_NUM_THREADS": "1"}


def as_owner(url: str) -> dict[str, str]:
    """Returns request headers with the token of the user who started the controller at an address."""
    return {"Authorization": f"Bearer {find_token(url)}"}


def slipstream(*arguments: str | Path, timeout: float = 300, folder: Path = REPOSITORY) -> Finished:
    """Runs a command to its end, in a folder."""
    result = run_forked(
        ["slipstream", *map(str, arguments)],
        environment=environment(),
        folder=folder,
        timeout=timeout,
    ) or subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env=environment(),
    )
    return Finished(result.returncode, result.stdout, result.stderr)


def train(spec: Path, state_directory: Path, *overrides: str, timeout: float = 600) -> Finished:
    """Trains a specification to its end."""
    settings = [argument for override in overrides for argument in ("--set", override)]
    return slipstream(
        "run", spec, "--json", "--state-directory", state_directory, *settings, timeout=timeout
    )


def run_module(name: str, *arguments: str | Path) -> str:
    """Runs a module of the repository, which must succeed; returns its output."""
    result = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@contextmanager
def started(*arguments: str | Path, until: str) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """Yields a running command once a line of its output matches ``until``."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if re.search(until, line):
                break
        assert process.poll() is None, "".join(lines)
        yield process, lines
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                # Keep reading: a command that blocks on a write does not end.
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def descendants(process: subprocess.Popen) -> dict[str, psutil.Process]:
    """Returns all processes below a command, by the service that they run."""
    result = {}
    for child, arguments in below(psutil.Process(process.pid)):
        match = re.search(r"services\.(\w+)", " ".join(arguments))
        result[f"{match.group(1) if match else 'other'}-{child.pid}"] = child
    return result


def ranks_of(worker_id: str, state_directory: Path) -> dict[str, psutil.Process]:
    """Returns the processes of a worker of the only run by rank, from the launcher's record."""
    (record,) = state_directory.glob(f"*/logs/{worker_id}.process")
    entries = json.loads(record.read_text())
    return {str(rank): psutil.Process(entry["pid"]) for rank, entry in enumerate(entries)}


def assert_all_gone(children: dict[str, psutil.Process]) -> None:
    # On a busy machine, services whose command was killed first pause their run.
    _, alive = psutil.wait_procs(list(children.values()), timeout=60)
    assert not alive
