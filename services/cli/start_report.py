"""Reports how long each part of a run's start took, to show the cause of a slow start."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psutil

START = "start.json"
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
    def measured(self, part: str) -> Iterator[None]:
        """Measures a part that the command does itself."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = round(time.monotonic() - begin, 2)

    def process(self, kind: str, event: Mapping[str, Any]) -> bool:
        """Processes an event; returns True once, when the first step completes the report.

        A run that resumes after its first step gets no report.
        """
        if self.is_complete:
            return False
        if kind == "StateChanged" and event["data"]["to"] == "STARTING":
            self._since = datetime.fromisoformat(event["time"])
        part = _PARTS.get(kind)
        if part is None or self._since is None or part in self.seconds:
            return False
        now = datetime.fromisoformat(event["time"])
        self.seconds[part] = round((now - self._since).total_seconds(), 2)
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
    return "; ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
