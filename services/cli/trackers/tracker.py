"""What a tracker is to the process that writes a run to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from services.common.runspec.trackers import TrackerSpec
from services.controller.models import RunView
from services.controller.samples import SampleView

Split = Literal["train", "heldout"]

COLUMNS = (
    *("id", "step", "reward", "terms", "advantage", "staleness", "finish_reason"),
    *("response_tokens", "prompt", "response"),
)
"""Of a table of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something happened to a run."""

    seq: int
    """Number of its event."""
    step: int
    """Trained step; of an evaluation, the weight version."""
    time: float
    """Seconds since the epoch."""


class Tracker(Protocol):
    """One run in a tracker. Its calls may block and raise; a moment that comes twice counts once."""

    rereads: int
    """Events that it is told again when it is opened anew, because it keeps them with a delay."""

    def numbers(self, moment: Moment, numbers: Mapping[str, float]) -> None:
        """Keep numbers of a step or of an evaluation."""

    def samples(self, moment: Moment, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Keep a table of samples, each with a value for each of ``COLUMNS``."""

    def close(self, state: str) -> None:
        """Let go of it.

        Args:
            state: In which the run has ended, or empty if it goes on another time.
        """


OpenTracker = Callable[[RunView, TrackerSpec, Path], Tracker]
"""Opens a run in a tracker, the same one each time, with a folder for what it keeps here."""


class Newest:
    """The newest step of each number that a tracker has, so that none is kept twice.

    A step that is trained again, because its trainer was lost, keeps its first numbers.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def saw(self, name: str, step: int) -> None:
        """A number is there already."""
        self._steps[name] = max(step, self._steps.get(name, step))

    def take(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Those that are new; they count as kept from now on."""
        new = {name: n for name, n in numbers.items() if step > self._steps.get(name, -1)}
        self._steps |= dict.fromkeys(new, step)
        return new


def row_of(sample: SampleView) -> tuple[Any, ...]:
    """A sample in the order of ``COLUMNS``."""
    facts = sample.model_dump()
    terms = ", ".join(f"{name} {value:.4g}" for name, value in sample.terms.items())
    return tuple(terms if name == "terms" else facts[name] for name in COLUMNS)


def as_markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table of samples for trackers that show Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    # What the model wrote is text, not Markdown.
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ⏎ ")
