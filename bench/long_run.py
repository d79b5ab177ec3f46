"""Measures memory and files of a long run: ``python -m bench.long_run [--steps 20000] [--smoke]``.

Trains sort4 with two rollouts, staleness up to 2, kept samples, evaluations and checkpoints, and records the
memory of every process and the size of every kind of file about every 20 s. The growth of a process is the
median slope (Theil-Sen) of its memory over the steps after step 2,000. A process that was replaced, such as
one that calls rewards, counts with its successors.

``--prompts`` trains fewer prompts a step than sort4's 32, and ``--evaluate-every`` evaluates less often, if
there is no time for 20,000 such steps; the result lists the settings. The end of ``--minutes``, SIGTERM and
SIGINT end the run; the result then has the steps so far, and ``wanted_steps``.

Bars: no process grows by more than 1 KB a step after step 2,000; the file of the samples does not exceed
``samples.max_bytes``; the checkpoints are at most ``trainer.checkpoint.keep`` and the best one.
"""

import argparse
import platform
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from bench.report import report_to, write_json
from bench.whole_run import REPOSITORY, output_of, run_folder, running

RESULTS = REPOSITORY / "bench" / "results" / "long-run.json"
SPEC = REPOSITORY / "examples" / "sort4.yaml"
AFTER_STEP = 2_000
BAR_BYTES = 1_024.0
KEEP = 2
MAX_SAMPLE_BYTES = 64 << 20
SETTINGS = (
    "algorithm.max_staleness=2",
    "trainer.checkpoint.every=500",
    f"trainer.checkpoint.keep={KEEP}",
    f"samples.max_bytes={MAX_SAMPLE_BYTES}",
)
_EVERY_S = 20.0
_WRITE_EVERY = 3
"""Number of points after which the results so far are written."""
_MAX_POINTS = 200
_MAX_SLOPES = 20_000
_FILES: Mapping[str, Sequence[str]] = {
    "database": ("slipstream.db*",),
    "samples": ("samples/*.db",),
    "checkpoints": ("run_*/checkpoints/**/*", "snapshots/**/*"),
    "metrics": ("run_*/metrics.jsonl", "run_*/evaluations.jsonl"),
    "logs": ("logs/**/*", "run_*/logs/**/*"),
}
"""Files below the state directory, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Memory and files at one moment."""

    step: int
    seconds: float
    """Time since the start of the command."""
    memory: Mapping[str, int]
    """Bytes of resident memory by process, without shared memory and mapped files."""
    processor_s: Mapping[str, float]
    """Processor time so far by process."""
    files: Mapping[str, int]
    """Bytes by kind of file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="ends the run after this time")
    parser.add_argument("--prompts", type=int, help="prompts per step; default: those of sort4")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--smoke", action="store_true", help="100 steps; writes no results")
    parser.add_argument("--folder", type=Path, help="keeps the run in this folder")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    arguments = parser.parse_args()
    steps = 100 if arguments.smoke else arguments.steps
    after = steps // 2 if arguments.smoke else AFTER_STEP
    out = None if arguments.smoke else arguments.json
    settings = (*SETTINGS, f"validation.every={arguments.evaluate_every}")
    if arguments.prompts is not None:
        settings = (*settings, f"trainer.prompts_per_step={arguments.prompts}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    points: list[Point] = []
    with run_folder(arguments.folder) as folder, suppress(KeyboardInterrupt):
        for point in measured(folder, settings, steps=steps, minutes=arguments.minutes):
            points.append(point)
            if out is not None and len(points) % _WRITE_EVERY == 0:
                write_json(out, {"wanted_steps": steps, **result(points, settings, after=after)})
    results = {"wanted_steps": steps, **result(points, settings, after=after)}
    report_to(out, results)
    if not arguments.smoke and results["failed"]:
        raise SystemExit(f"above the bar: {', '.join(results['failed'])}")


def measured(
    folder: Path, settings: Sequence[str], *, steps: int, minutes: float
) -> Iterator[Point]:
    """Trains with further settings, and yields a point about every 20 s.

    Raises:
        SystemExit: If the run fails, with the end of its output.
    """
    begin = time.monotonic()
    with running(folder, (*settings, f"trainer.steps={steps}"), spec=SPEC) as command:
        root = psutil.Process(command.pid)
        while command.poll() is None and time.monotonic() < begin + 60 * minutes:
            time.sleep(2.0 if steps <= 100 else _EVERY_S)
            with suppress(psutil.NoSuchProcess):
                memory, processor_s = usage_of(root)
                yield Point(
                    step=num_steps(folder),
                    seconds=time.monotonic() - begin,
                    memory=memory,
                    processor_s=processor_s,
                    files=sizes_of(folder),
                )
        if command.poll() not in (None, 0):
            raise SystemExit(output_of(folder)[-4000:])


def usage_of(root: psutil.Process) -> tuple[dict[str, int], dict[str, float]]:
    """Returns the private bytes and the processor seconds of a command and its descendants.

    Both are by name; those of equal names are added.
    """
    memory: dict[str, int] = defaultdict(int)
    processor_s: dict[str, float] = defaultdict(float)
    names: dict[int, str] = {}
    for process in (root, *root.children(recursive=True)):
        # It may end meanwhile, or be a zombie.
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
            name = _name(process, names) if names else "command"
            names[process.pid] = name
            memory[name] += _private_bytes(process)
            times = process.cpu_times()
            processor_s[name] += times.user + times.system
    return dict(memory), dict(processor_s)


def _private_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _name(process: psutil.Process, names: Mapping[int, str]) -> str:
    """Returns the service or worker of a process; others are named like their parent."""
    service = next((a for a in process.cmdline() if a.startswith("services.")), "")
    if service in ("services.rollout", "services.trainer"):
        log = (Path("/proc") / str(process.pid) / "fd" / "1").readlink()
        return f"{log.stem}, its processes" if log.stem in names.values() else log.stem
    if service:
        return service.removeprefix("services.")
    parent = names.get(process.ppid(), "command").removesuffix(", its processes")
    return f"{parent}, its processes"


def num_steps(folder: Path) -> int:
    """Returns the number of finished steps of the only run in a folder."""
    count = 0
    for path in folder.glob("run_*/metrics.jsonl"):
        with path.open("rb") as file:
            count += sum(1 for _ in file)
    return count


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns the bytes of the files of a state directory by kind."""
    sizes: dict[str, int] = {}
    for kind, patterns in _FILES.items():
        sizes[kind] = 0
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            with suppress(FileNotFoundError):  # it was replaced meanwhile
                sizes[kind] += path.stat().st_size if path.is_file() else 0
    return sizes


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Returns the median slope of all pairs of points; 0 without two different steps."""
    stride = max(1, round((len(points) ** 2 / 2 / _MAX_SLOPES) ** 0.5))
    pairs = combinations(points[::stride], 2)
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in pairs if j != i]
    return statistics.median(slopes) if slopes else 0.0


def _rate(points: Sequence[Point]) -> float:
    if len(points) < 2:
        return 0.0
    first, last = points[0], points[-1]
    return round((last.step - first.step) / (last.seconds - first.seconds), 2)


def _processor_ms(points: Sequence[Point]) -> dict[str, float]:
    """Returns the processor time of each process that lived at the first and the last point."""
    if not points or points[0].step == points[-1].step:
        return {}
    first, last = points[0], points[-1]
    return {
        name: round(1000 * (seconds - first.processor_s[name]) / (last.step - first.step), 1)
        for name, seconds in last.processor_s.items()
        if name in first.processor_s
    }


def result(points: Sequence[Point], settings: Sequence[str], *, after: int) -> dict[str, Any]:
    """Returns the growth after a step, the curve, and which bars do not hold."""
    late = [point for point in points if point.step >= after]
    names = sorted({name for point in late for name in point.memory})
    growth = {
        name: round(slope([(p.step, p.memory[name]) for p in late if name in p.memory]), 1)
        for name in names
    }
    files = {
        kind: round(slope([(point.step, point.files[kind]) for point in late]), 1)
        for kind in _FILES
    }
    largest = {kind: max((p.files[kind] for p in points), default=0) for kind in _FILES}
    failed = [name for name, bytes_per_step in growth.items() if bytes_per_step > BAR_BYTES]
    if largest["samples"] > MAX_SAMPLE_BYTES:
        failed.append("samples.max_bytes")
    stride = -(-len(points) // _MAX_POINTS) or 1
    return {
        "host": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "settings": [*settings],
        "steps": points[-1].step if points else 0,
        "seconds": round(points[-1].seconds) if points else 0,
        "steps_per_s": _rate(late),
        "processor_ms_per_step": _processor_ms(late),
        "after_step": after,
        "growth_bytes_per_step": growth,
        "bar_bytes_per_step": BAR_BYTES,
        "file_bytes_per_step": files,
        "largest_file_bytes": largest,
        "failed": failed,
        "curve": [
            {
                "step": point.step,
                "seconds": round(point.seconds),
                "memory_mib": {name: round(size / 2**20, 2) for name, size in point.memory.items()},
                "files_mib": {kind: round(size / 2**20, 2) for kind, size in point.files.items()},
            }
            for point in points[::stride]
        ],
    }


if __name__ == "__main__":
    main()
