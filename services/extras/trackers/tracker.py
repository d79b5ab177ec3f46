"""Interface between a tracker and the process that writes a run to it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict

from services.common.host import write_atomically
from services.common.runspec.trackers import TrackerSpec
from services.controller.schemas import RunView, SampleView

Split = Literal["train", "heldout"]

COLUMNS = (
    *("id", "step", "reward", "terms", "advantage", "staleness", "finish_reason"),
    *("response_tokens", "prompt", "response"),
)
"""Columns of a table of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPosition:
    """Position of an event in a run."""

    seq: int
    """Sequence number of the event."""
    step: int
    """Trained step; for an evaluation, the weight version."""
    time: float
    """Unix time in seconds."""


class Tracker(Protocol):
    """One run in a tracker.

    Calls may block and raise. Values that are written twice for an event position count once.
    """

    rereads: int
    """Number of past events to write again after opening, because the tracker stores them with a
    delay."""

    def numbers(self, moment: EventPosition, numbers: Mapping[str, float]) -> None:
        """Writes metrics of a step or of an evaluation."""

    def samples(self, moment: EventPosition, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Writes a table of samples, each with one value per column of ``COLUMNS``."""

    def close(self, state: str) -> None:
        """Closes the run in the tracker.

        Args:
            state: State in which the run has ended; empty if it will continue later.
        """


OpenTracker = Callable[[RunView, TrackerSpec, Path], Tracker]
"""Function that opens a run's entry in a tracker, the same one at each call; the path is for local files."""


class NewestSteps:
    """Newest step of each metric in a tracker, so that no value is written twice.

    A step that is trained again after the loss of a trainer keeps its first values.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def record_step(self, name: str, step: int) -> None:
        self._steps[name] = max(step, self._steps.get(name, step))

    def pop_new(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Returns the new metrics and records them as written."""
        new = {name: n for name, n in numbers.items() if step > self._steps.get(name, -1)}
        self._steps |= dict.fromkeys(new, step)
        return new


def row_of(sample: SampleView) -> tuple[Any, ...]:
    """Returns a sample as a row in the order of ``COLUMNS``."""
    facts = sample.model_dump()
    terms = ", ".join(f"{name} {value:.4g}" for name, value in sample.terms.items())
    return tuple(terms if name == "terms" else facts[name] for name in COLUMNS)


def as_markdown(rows: Sequence[Sequence[Any]]) -> str:
    """Formats a table of samples for trackers that display Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    # Escape the model's text, which is not Markdown.
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ⏎ ")


GONE = 3
"""Exit code of a tracker process if the controller is gone, which is not a failure of the tracker."""


class TrackerJob(BaseModel):
    """The job of one tracker process: one run, one tracker."""

    model_config = ConfigDict(frozen=True)

    url: str
    """REST address of the controller."""
    run_id: str
    kind: str
    """Key of ``TRACKERS``."""
    folder: Path
    """Folder of cursors and of files that trackers write."""
    deadline_s: float
    """Max seconds of one call of the tracker; after that, the process ends."""
    is_failing: bool = False
    """True if the controller has a report that the tracker fails, which must be withdrawn on
    recovery."""


CURSORS = "cursors"
"""Name of the cursors' folder in the trackers' folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position up to which a run is written to a tracker."""

    seq: int = 0
    """Sequence number of the last written event."""
    is_done: bool = False
    """True if the run has ended and all events are written."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the stored cursor; the beginning if there is none or its file is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        """Stores the cursor atomically."""
        write_atomically(path, json.dumps(asdict(self)))


def cursor_path(folder: Path, run_id: str, kind: str) -> Path:
    return folder / CURSORS / run_id / f"{kind}.json"
