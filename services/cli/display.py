"""Progress display of a run: a live table on a terminal, plain lines otherwise."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.output import REPEAT_EVERY_S

_ROWS = 12
_NUMBER = re.compile(r"\d[\d.,]*")
_COLUMNS = ("step", "reward", "held-out", "stale", "sync ms", "tok/s", "queue", "idle")
"""Columns; at most 80 characters wide together."""
_RECENT = 20
"""Newest steps whose mean duration predicts the remaining time."""


class Display(Protocol):
    """Displays the progress of a run."""

    def __enter__(self) -> Self:
        """Starts the display."""

    def __exit__(self, *_: object) -> None:
        """Ends the display."""

    def workers(
        self, workers: Sequence[Mapping[str, Any]], *, seconds: float, reason: str = ""
    ) -> None:
        """Shows why the first step has not finished.

        Args:
            seconds: Seconds since the run started.
            reason: Reported reason for a lack of progress, if there is one.
        """

    def set_num_steps(self, num_steps: int) -> None:
        """Sets the number of steps; with ``data.epochs`` it is known only after the data is opened."""

    def step(self, record: Mapping[str, Any], newest: Mapping[str, Any] | None) -> None:
        """Shows a completed step.

        Args:
            newest: Newest evaluation, with ``greedy`` and ``sampled``; None before the first.
        """

    def print_message(self, text: str) -> None:
        """Shows any other event."""

    def saving(self, text: str, *, seconds: float) -> None:
        """Shows the progress of the last checkpoint and the seconds since its start."""


def make_display(title: str, total_steps: int, console: Console) -> Display:
    if console.is_terminal:
        return _LiveTable(title, total_steps, console)
    return _PlainLines(total_steps, console)


def row_of(record: Mapping[str, Any], newest: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the cells of one step, in the order of the columns."""
    return (
        f"{record['step']}",
        _score(record, "reward_mean") if "reward_mean" in record else _loss(record),
        f"{_score(newest, 'greedy')}/{_score(newest, 'sampled')}",
        f"{record.get('staleness_mean', 0.0):.1f}/{record.get('staleness_max', 0):.0f}",
        f"{record['sync_ms']:.0f}" if "sync_ms" in record else "-",
        f"{record.get('response_tokens', 0) / max(record['seconds'], 1e-9):,.0f}",
        f"{record['ready_groups']}+{record['running_groups']}",
        _idle_side(record),
    )


def heldout_line(data: Mapping[str, Any]) -> str:
    """Returns the results of an evaluation as text."""
    greedy, sampled = _score(data, "greedy"), _score(data, "sampled")
    scores = f"greedy {greedy}, sampled {sampled} ({data['reason']})"
    sets = data.get("by_set", {})
    lines = [f"held-out, version {data['version']}: {scores}"]
    # The scores of a single set equal the total.
    lines += [f"  {name}: {set_line(of_set)}" for name, of_set in sets.items() if len(sets) > 1]
    return "\n".join(lines)


def set_line(scores: Mapping[str, float]) -> str:
    """Returns the scores of a set of held-out prompts as text."""
    names = [name for name in scores if name in ("greedy", "sampled") or name.startswith("pass@")]
    return ", ".join(f"{name} {_score(scores, name)}" for name in names)


def duration(seconds: float) -> str:
    """Formats seconds: ``48 s``, ``2:05 min``, ``1:02:09 h``."""
    whole_seconds = round(seconds)
    minutes, hours = whole_seconds // 60, whole_seconds // 3600
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole_seconds % 60:02} h"
    return f"{minutes}:{whole_seconds % 60:02} min" if minutes else f"{whole_seconds} s"


class _Pace:
    """Predicts the remaining time of a run from its newest steps."""

    def __init__(self, total_steps: int) -> None:
        self.total = total_steps
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def rest(self, record: Mapping[str, Any]) -> str:
        """Returns the time from a step to the end of the run."""
        self._seconds.append(record["seconds"])
        steps_left = self.total - record["step"]
        return duration(steps_left * sum(self._seconds) / len(self._seconds))


def _score(score: Mapping[str, Any] | None, name: str) -> str:
    value = None if score is None else score.get(name)
    return "-" if value is None else f"{value:.3f}"


def _loss(record: Mapping[str, Any]) -> str:
    """Returns the loss as a substitute for a missing reward."""
    return f"(loss {record['loss']:.3f})" if "loss" in record else "-"


def _idle_side(record: Mapping[str, Any]) -> str:
    """Returns the side that was idle for longer, with its idle seconds; ``none`` below 2 % of the step.

    Returns ``both``, with the seconds in common, if both sides were idle at the same time for most of it:
    they did not wait for each other.
    """
    trainer, rollouts = record["trainer_wait_s"], record["rollout_idle_s"]
    if max(trainer, rollouts) < 0.02 * record["seconds"]:
        return "none"
    both_s = trainer + rollouts - record["seconds"]
    if both_s > max(trainer, rollouts) / 2:
        return f"both {both_s:.1f}s"
    if trainer >= rollouts:
        return f"trainer {trainer:.1f}s"
    return f"rollouts {rollouts:.1f}s"


class _PlainLines:
    def __init__(self, total_steps: int, console: Console) -> None:
        self._console = console
        self._pace = _Pace(total_steps)
        self._activity: str | None = None
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: plain lines need no cleanup."""

    def workers(
        self, workers: Sequence[Mapping[str, Any]], *, seconds: float, reason: str = ""
    ) -> None:
        # A change of numbers only is not worth a new line.
        doing = _NUMBER.sub("", _doing(workers)) + reason
        if doing != self._activity or seconds - self._printed_at >= REPEAT_EVERY_S:
            self._activity, self._printed_at = doing, seconds
            self._line(_starting(workers, seconds, reason))

    def set_num_steps(self, num_steps: int) -> None:
        self._pace.total = num_steps

    def step(self, record: Mapping[str, Any], newest: Mapping[str, Any] | None) -> None:
        step, reward, scores, staleness, sync, tokens, queue, idle = row_of(record, newest)
        self._line(
            f"step {step:>4}/{self._pace.total}  reward {reward}  held-out {scores}  staleness {staleness}  "
            f"sync {sync} ms  {tokens} tokens/s  queue {queue}  idle: {idle}  "
            f"left {self._pace.rest(record)}"
        )

    def print_message(self, text: str) -> None:
        self._line(text)

    def saving(self, text: str, *, seconds: float) -> None:
        if self._activity != "saving" or seconds - self._printed_at >= REPEAT_EVERY_S:
            self._activity, self._printed_at = "saving", seconds
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


class _LiveTable:
    def __init__(self, title: str, total_steps: int, console: Console) -> None:
        self._title = title
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self._status = "starting"
        self._done = 0
        self._pace = _Pace(total_steps)
        self._live = Live(self._render(), console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def workers(
        self, workers: Sequence[Mapping[str, Any]], *, seconds: float, reason: str = ""
    ) -> None:
        self._status = _starting(workers, seconds, reason)
        self._live.update(self._render())

    def set_num_steps(self, num_steps: int) -> None:
        self._pace.total = num_steps

    def step(self, record: Mapping[str, Any], newest: Mapping[str, Any] | None) -> None:
        self._rows.append(row_of(record, newest))
        self._done = record["step"]
        self._status = f"{self._done}/{self._pace.total}, {self._pace.rest(record)} left"
        self._live.update(self._render())

    def print_message(self, text: str) -> None:
        self._live.console.print(text)

    def saving(self, text: str, *, seconds: float) -> None:
        self._status = text
        self._live.update(self._render())

    def _render(self) -> RenderableType:
        title = Text(self._title, style="bold", overflow="ellipsis", no_wrap=True)
        if not self._rows:
            return Group(title, Text(self._status))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(total=self._pace.total, completed=self._done), self._status)
        return Group(title, table, bar)


def _doing(workers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{worker['worker_id']} {worker['activity'] or worker['state'].lower()}"
        for worker in workers
    )


def _starting(workers: Sequence[Mapping[str, Any]], seconds: float, reason: str) -> str:
    are_ready = all(w["state"].lower() == "ready" and not w["activity"] for w in workers)
    if workers and are_ready:
        return f"first step, {seconds:.0f} s: {reason or 'all workers are ready'}"
    return f"starting, {seconds:.0f} s: {_doing(workers) or 'the workers are starting'}"
