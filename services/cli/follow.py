"""Follows a run to its end: displays progress, then writes summary.json, metrics.jsonl and curves.png."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console

from services.cli.api import Api, ApiError, fields_of
from services.cli.display import Display, duration, heldout_line, make_display, set_line
from services.cli.output import TELL_EVERY_S
from services.cli.step_log import JsonLines, StepLog
from services.common.task_group import TaskGroup
from services.controller.api.operations import GetTopology

START = "start.json"
_PROMPT_COUNTS: Final = ("issued", "consumed", "dropped", "quarantined", "outstanding")
# Event that ends each part, in order; the state change to STARTING begins the first one.
_PARTS: Final = {
    "WorkersReady": "workers",
    "WeightsPublished": "first weights",
    "StepCommitted": "first step",
}


@dataclass(slots=True)
class StartReport:
    """Collects the parts of a start from a run's events, up to its first step."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part, in order."""
    workers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Duration of each phase of a worker's start, by worker."""
    is_complete: bool = False
    _since: datetime | None = None

    def record_imports(self) -> None:
        """Records the time since this process was started."""
        self.seconds["imports"] = round(time.time() - psutil.Process().create_time(), 2)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measures a part that the command does itself."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.monotonic() - begin, 2)

    def process(self, kind: str, event: Mapping[str, Any]) -> bool:
        """Processes an event; returns True once, when the first step completes the report.

        A run that resumes after its first step gets no report.
        """
        if self.is_complete:
            return False
        if kind == "StateChanged" and event["data"]["to"] == "STARTING":
            self._since = datetime.fromisoformat(event["time"])
        phase = _PARTS.get(kind)
        if phase is None or self._since is None or phase in self.seconds:
            return False
        now = datetime.fromisoformat(event["time"])
        self.seconds[phase] = round((now - self._since).total_seconds(), 2)
        self._since = now
        if kind == "WorkersReady":
            self.workers = event["data"].get("start_seconds", {})
        self.is_complete = kind == "StepCommitted"
        return self.is_complete

    def text(self) -> str:
        """Returns the report as lines for people."""
        total = sum(self.seconds.values())
        lines = [f"start {total:.1f} s: {_listed(self.seconds)}"]
        lines += (f"  {name}: {_listed(phases)}" for name, phases in self.workers.items())
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes ``start.json`` into the run's folder."""
        content = {"seconds": self.seconds, "workers": self.workers}
        (folder / START).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _listed(seconds: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {duration_s:.1f}" for name, duration_s in seconds.items())


_STYLES = ("-", "--", ":", "-.")
_STALENESS = ("staleness_mean", "staleness_max")
_MAX_POINTS = 2_000
"""Max steps that a curve shows; of more, it shows every n-th."""
_TOLD = (
    "StateChanged",
    "DataChanged",
    "Waiting",
    "WorkerPending",
    "WorkerLost",
    "Draining",
    "Drained",
    "RolloutCutOff",
    "RolloutReconnected",
    "WorkerCutOff",
    "WorkerReconnected",
    "GroupFailed",
    "CheckpointFailed",
    "CheckpointsVolatile",
    "NoProgress",
    "NothingLearned",
    "StepSkipped",
    "Rewound",
    "QuantizationEnded",
    "TrackerFailed",
    "TrackerRecovered",
    "Advice",
)


def draw(path: Path, run: Mapping[str, Any], log: StepLog) -> None:
    """Draws the curves of a run into a PNG file."""
    # Imported here: it takes a second, and every command that follows a run imports this module.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    figure = Figure(figsize=(11, 7), layout="constrained")
    (reward, accuracy), (staleness, sync) = figure.subplots(2, 2)
    records = _thinned(log.records, ("step", "reward_mean", *_STALENESS, "sync_ms"))
    heldout = _thinned(log.heldout, ("version", "greedy", "sampled", "sets"))
    steps = [record["step"] for record in records]
    versions = [score["version"] for score in heldout]

    _line(reward, steps, [record["reward_mean"] for record in records], "reward")
    _decorate(reward, "Training reward", "mean reward of the batch")

    for kind in ("greedy", "sampled"):
        _line(accuracy, versions, [score[kind] for score in heldout], kind, marker="o")
    sets = dict.fromkeys(name for score in heldout for name in score["sets"])
    for name in sets if len(sets) > 1 else ():
        of_set = [score["sets"].get(name, {}).get("greedy") for score in heldout]
        _line(accuracy, versions, of_set, f"{name}, greedy", marker=".")
    _decorate(accuracy, "Held-out accuracy", "mean reward")

    for name in _STALENESS:
        kind = name.removeprefix("staleness_")
        _line(staleness, steps, [record[name] for record in records], kind)
    bound = run["summary"]["staleness"]["bound"]
    staleness.axhline(bound, linestyle="--", color="grey", label=f"bound {bound}")
    _decorate(staleness, "Staleness of trained samples", "weight versions")

    _line(sync, steps, [record["sync_ms"] for record in records], "total")
    _decorate(sync, "Weight sync", "milliseconds")

    figure.suptitle(f"{run['name']}  ({run['id']})")
    figure.savefig(path, dpi=110)


def _thinned(lines: JsonLines, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns some values of at most ``_MAX_POINTS`` lines; a missing value is None."""
    stride = -(-len(lines) // _MAX_POINTS) or 1
    return [{name: line.get(name) for name in names} for line in islice(lines, 0, None, stride)]


def _line(
    axes: Any, x: Sequence[float], y: Sequence[float | None], label: str, *, marker: str = ""
) -> None:
    points = [(step, value) for step, value in zip(x, y, strict=True) if value is not None]
    # Different line styles keep overlapping lines visible.
    style = _STYLES[len(axes.lines) % len(_STYLES)]
    axes.plot(*zip(*points, strict=True) if points else ((), ()), style, label=label, marker=marker)


def _decorate(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if axes.dataLim.ymin >= 0:  # rewards may be negative
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def write_report(
    folder: Path, run: Mapping[str, Any], log: StepLog, *, wall_seconds: float
) -> Path:
    """Writes all report files; returns the path of ``summary.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    log.finish()
    if len(log.records):
        draw(folder / "curves.png", run, log)
    summary = {
        "run_id": run["id"],
        "name": run["name"],
        "state": run["state"],
        "state_reason": run["state_reason"],
        "message": run["message"],
        "wall_seconds": round(wall_seconds, 2),
        **run["summary"],
    }
    path = folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return path


def summary_lines(
    run: Mapping[str, Any], folder: Path, log: StepLog, *, wall_seconds: float
) -> list[str]:
    summary = run["summary"]
    lines = [f"{run['name']} {run['state']} after {duration(wall_seconds)} ({run['state_reason']})"]
    if run["message"]:
        lines.append(run["message"])
    if not summary:
        return lines
    if learning := summary.get("nothing_learned"):
        lines.append(learning["message"])
    heldout, staleness = summary["heldout"], summary["staleness"]
    prompts, sync, sets = summary["prompts"], summary["sync_ms"], heldout.get("sets", {})
    lines += [
        f"  steps       {summary['steps']}, weight version {summary['weight_version']}",
        *([f"  learning    {drop['message']}"] if (drop := summary.get("reward_drop")) else []),
        f"  held-out    greedy {_number(heldout['greedy'])}, sampled {_number(heldout['sampled'])}",
        # The scores of a single set equal the total, except for those of several samples.
        *(
            f"    {name}: {set_line(scores)}"
            for name, scores in sets.items()
            if len(sets) > 1 or "pass@2" in scores
        ),
        f"  staleness   mean {staleness['mean']:.2f}, max {staleness['max']}, bound {staleness['bound']}",
        f"  weight sync p50 {_number(sync['p50'], 1)} ms, p95 {_number(sync['p95'], 1)} ms",
        "  prompts     " + ", ".join(f"{prompts[name]} {name}" for name in _PROMPT_COUNTS),
        f"  files       {folder}/summary.json, metrics.jsonl, curves.png",
    ]
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


async def follow(
    api: Api,
    run_id: str,
    *,
    state_directory: Path,
    console: Console,
    start: StartReport | None = None,
) -> dict[str, Any]:
    """Displays a run until it ends.

    Args:
        start: Report of the run's start, with what the command has done before.

    Returns:
        The ended run, with ``summary_path`` added.
    """
    run = (await api.get(run_id)).model_dump(mode="json")
    folder = state_directory / run_id
    folder.mkdir(parents=True, exist_ok=True)
    log, start = StepLog(folder), start or StartReport()
    with make_display(f"{run['name']}  {run_id}", run["target_steps"], console) as display:
        async with TaskGroup() as tasks:
            reasons: deque[str] = deque([""], maxlen=1)
            starting = tasks.create_task(_show_start(api, run_id, display, reasons))
            saving: asyncio.Task[None] | None = None
            last_step = run["target_steps"]
            async for kind, event in api.watch(run_id):
                with fields_of(api.url, f"event {kind}"):
                    _show(kind, event, log, display)
                    _show_report(start, kind, event, display, folder)
                    if kind == "DataOpened":
                        last_step = int(event["data"]["steps"])
                    is_last = kind == "CheckpointStarted" and event["data"]["step"] == last_step
                log.write()
                if kind in ("StepCommitted", "end"):
                    starting.cancel()
                if kind == "NoProgress":
                    reasons.append(event["message"])
                if is_last:
                    # After a restart of the controller, the last checkpoint starts a second time.
                    if saving:
                        saving.cancel()
                    saving = tasks.create_task(_show_saving(api, run_id, display))
                if saving and kind in ("CheckpointSaved", "CheckpointFailed", "end"):
                    saving.cancel()
                if kind == "end":
                    run = event
    with fields_of(api.url, "the run"):
        wall_seconds = _seconds(run)
        path = write_report(folder, run, log, wall_seconds=wall_seconds)
        for line in summary_lines(run, folder, log, wall_seconds=wall_seconds):
            console.print(line, soft_wrap=True)
    return {**run, "summary_path": str(path)}


def _show(kind: str, event: Mapping[str, Any], log: StepLog, display: Display) -> None:
    for record in log.process(kind, event):
        display.step(record, log.newest_score)
    if kind == "DataOpened":
        display.set_num_steps(event["data"]["steps"])
    if kind == "Validated":
        display.print_message(heldout_line(event["data"]))
    elif kind in _TOLD:
        display.print_message(event["message"])


def _show_report(
    start: StartReport, kind: str, event: Mapping[str, Any], display: Display, folder: Path
) -> None:
    """Shows and writes the report of the start when the first step completes it."""
    if start.process(kind, event):
        display.print_message(start.text())
        start.write(folder)


async def _show_start(api: Api, run_id: str, display: Display, reasons: Sequence[str]) -> None:
    """Shows the workers' activities, or the newest reason for no progress, until the first step is done."""
    begin = time.monotonic()
    while True:
        try:
            workers = await api.call(GetTopology(run_id=run_id))
        except ApiError:
            return
        seconds = time.monotonic() - begin
        doing = [worker.model_dump() for worker in workers.items]
        display.workers(doing, seconds=seconds, reason=reasons[-1])
        await asyncio.sleep(TELL_EVERY_S)


async def _show_saving(api: Api, run_id: str, display: Display) -> None:
    """Shows the progress of the last checkpoint, as the trainers report it."""
    begin = time.monotonic()
    while True:
        try:
            workers = await api.call(GetTopology(run_id=run_id))
        except ApiError:
            return
        progress = [
            worker.activity for worker in workers.items if worker.gauges.get("checkpoint_bytes")
        ]
        if progress:
            display.saving(", ".join(progress), seconds=time.monotonic() - begin)
        await asyncio.sleep(TELL_EVERY_S)


def _seconds(run: Mapping[str, Any]) -> float:
    """Returns the duration of an ended run without its time in the queue; 0 if the clock was set back."""
    begin, end = run.get("start_time") or run["create_time"], run["finish_time"]
    return max((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds(), 0.0)
