"""A run with all services on this host, as a user starts it, and its results."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

REPOSITORY = Path(__file__).parents[1]
_SORT4 = REPOSITORY / "examples" / "sort4.yaml"
_POLL_S = 0.5
_AGAIN_S = 3.0
_OUTPUT = "output.log"


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A run that succeeded, or was ended after enough steps."""

    summary: dict[str, Any]
    """Summary of the run; empty if it was ended."""
    steps: list[dict[str, Any]]
    """Reports of the steps."""
    began: float
    """Unix time of the command in seconds."""

    def means(self, names: Iterable[str], *, after: int) -> dict[str, float]:
        """Returns means over the steps except the first ``after``; a metric without a value counts as 0."""
        steps = self.steps[after:]
        return {name: round(mean(step.get(name, 0.0) for step in steps), 4) for name in names}

    def committed(self) -> list[float]:
        """Returns the commit time of each step in seconds since the command."""
        times = (datetime.fromisoformat(step["time"]).timestamp() for step in self.steps)
        return [moment - self.began for moment in times]


def whole_run(folder: Path, settings: Iterable[str], *, spec: Path = _SORT4) -> WholeRun:
    """Trains to the end.

    Args:
        folder: Folder for runs and logs.
        settings: Overrides of the specification, such as ``trainer.steps=3``.
        spec: The specification.

    Raises:
        SystemExit: If the run fails, with its output.
    """
    command, began = _command(folder, settings, spec), time.time()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    summary = Path(done.stdout.splitlines()[-1])
    text = summary.read_text(encoding="utf-8")
    return WholeRun(json.loads(text), _steps(summary.with_name("metrics.jsonl")), began=began)


def run_for(
    num_steps: int,
    folder: Path,
    settings: Iterable[str],
    *,
    spec: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    min_steps: int | None = None,
) -> WholeRun:
    """Trains a number of steps of a longer run and ends it.

    A run that ends by itself would also finish its rollouts and save.

    Args:
        num_steps: Number of steps.
        folder: Folder for runs and logs, only for this run.
        settings: Overrides of the specification.
        spec: The specification, with more than ``num_steps`` steps.
        environment: Environment of the run; default: that of this process.
        timeout_s: Longest time from the command to the last step.
        min_steps: Steps that are enough after ``timeout_s``; default: all.

    Raises:
        SystemExit: If the run ends before, with its output.
        RuntimeError: If it takes longer than ``timeout_s``, with the steps so far and its output.
    """
    began = time.time()
    with running(folder, settings, spec=spec, environment=environment) as process:
        while process.poll() is None:
            time.sleep(_POLL_S)
            steps = steps_in(folder)
            if len(steps) >= num_steps:
                return WholeRun({}, steps[:num_steps], began=began)
            if timeout_s is not None and time.time() - began > timeout_s:
                if min_steps is not None and len(steps) >= min_steps:
                    return WholeRun({}, steps, began=began)
                raise RuntimeError(
                    f"{len(steps)} of {num_steps} steps within {timeout_s:.0f} s:\n{output_of(folder)}"
                )
    raise SystemExit(f"{spec} ended too early:\n{output_of(folder)}")


@contextmanager
def run_folder(chosen_folder: Path | None) -> Iterator[Path]:
    """Yields the folder of a benchmark's runs: the given one, or a temporary one that is removed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen_folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


@contextmanager
def running(
    folder: Path,
    settings: Iterable[str],
    *,
    spec: Path,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a run, which is ended with the block.

    Args:
        folder: Folder for runs and logs, only for this run.
        settings: Overrides of the specification.
        spec: The specification.
        port: Port of the API; 0 selects a free one.
        environment: Environment of the run; default: that of this process.
    """
    command = [*_command(folder, settings, spec), "--port", str(port)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _OUTPUT).open("w") as said:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process
    finally:
        _cancel(process)


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the reports of the steps so far of the only run in a folder."""
    return [step for path in folder.glob("run_*/metrics.jsonl") for step in _steps(path)]


def output_of(folder: Path) -> str:
    """Returns the output of a run's command."""
    return (folder / _OUTPUT).read_text(encoding="utf-8")


def exported(runs: Path, spec: Path) -> Path:
    """Exports the only checkpoint of the runs in a folder to a Hugging Face folder, once."""
    folder = runs / "exported"
    if not folder.exists():
        (checkpoint,) = runs.glob("**/checkpoints/*/")
        command = [sys.executable, "-m", "services.extras.export.checkpoint"]
        arguments = (str(checkpoint), str(spec), str(folder))
        subprocess.run([*command, *arguments], cwd=REPOSITORY, check=True)
    return folder


def _cancel(process: subprocess.Popen[bytes]) -> None:
    """Interrupts twice: the first signal pauses the run with a checkpoint."""
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_AGAIN_S)


def _command(folder: Path, settings: Iterable[str], spec: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "services.cli.main", "run", str(spec), "--json"),
        *("--state-directory", str(folder)),
        *(option for setting in settings for option in ("--set", setting)),
    ]


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """Returns complete lines only; the last one may be incomplete."""
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    return list(map(json.loads, lines))
