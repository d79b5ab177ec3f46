"""Progress of a run for a person: a live table on a terminal, plain lines elsewhere."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_ROWS = 12

_COLUMNS = (
    "step", "reward", "held-out greedy/sampled", "staleness mean/max", "sync ms", "tokens/s", "queue",
    "who waits",
)  # fmt: skip


class Display(Protocol):
    """Shows progress."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """What the workers are doing before the first step."""

    def step(self, record: Mapping[str, Any], heldout: Sequence[Mapping[str, Any]]) -> None:
        """A step is complete."""

    def note(self, text: str) -> None:
        """Something else happened."""


def make_display(title: str, total_steps: int, console: Console) -> Display:
    """The display that suits the console."""
    if console.is_terminal:
        return _LiveTable(title, total_steps, console)
    return _PlainLines(total_steps, console)


def row_of(record: Mapping[str, Any], heldout: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Cells of one step, in the order of the columns."""
    newest = heldout[-1] if heldout else None
    return (
        f"{record['step']}",
        _score(record, "reward_mean"),
        f"{_score(newest, 'greedy')} / {_score(newest, 'sampled')}",
        f"{record.get('staleness_mean', 0.0):.2f} / {record.get('staleness_max', 0):.0f}",
        f"{record['sync_ms']:.0f}" if "sync_ms" in record else "-",
        f"{record.get('response_tokens', 0) / max(record['seconds'], 1e-9):,.0f}",
        f"{record['ready_groups']} ready, {record['running_groups']} running",
        _who_waits(record),
    )


def _score(score: Mapping[str, Any] | None, name: str) -> str:
    value = None if score is None else score.get(name)
    return "-" if value is None else f"{value:.3f}"


def _who_waits(record: Mapping[str, Any]) -> str:
    trainer, rollouts = record["trainer_wait_s"], record["rollout_idle_s"]
    if max(trainer, rollouts) < 0.02 * record["seconds"]:
        return "nobody"
    if trainer >= rollouts:
        return f"trainer {trainer:.2f} s"
    return f"rollouts {rollouts:.2f} s"


class _PlainLines:
    def __init__(self, total_steps: int, console: Console) -> None:
        self._total = total_steps
        self._console = console
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to take down."""

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        text = _activities(workers)
        if text and text != self._shown:
            self._shown = text
            self._line(f"starting: {text}")

    def step(self, record: Mapping[str, Any], heldout: Sequence[Mapping[str, Any]]) -> None:
        step, reward, scores, staleness, sync, tokens, queue, waits = row_of(record, heldout)
        self._line(
            f"step {step:>4}/{self._total}  reward {reward}  held-out {scores}  staleness {staleness}  "
            f"sync {sync} ms  {tokens} tokens/s  queue {queue}  waits: {waits}"
        )

    def note(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


class _LiveTable:
    def __init__(self, title: str, total_steps: int, console: Console) -> None:
        self._title = title
        self._total = total_steps
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self._status = "starting"
        self._live = Live(self._render(), console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(exc_type, exc, traceback)

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        self._status = f"starting: {_activities(workers)}"
        self._live.update(self._render())

    def step(self, record: Mapping[str, Any], heldout: Sequence[Mapping[str, Any]]) -> None:
        self._rows.append(row_of(record, heldout))
        self._status = f"step {record['step']} of {self._total}"
        self._live.update(self._render())

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def _render(self) -> RenderableType:
        table = Table(expand=False)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return Group(Text(f"{self._title}   {self._status}", style="bold"), table)


def _activities(workers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{worker['worker_id']} {worker['activity'] or worker['state']}" for worker in workers
    )
