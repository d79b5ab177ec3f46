"""Events about checkpoints in an object store: one is complete there, or uploads fail."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.controller.membership import Worker
from services.controller.store.records import Note
from services.wire.controller import UPLOAD_FAILING_GAUGE, UPLOADED_STEP_GAUGE

_EVERY_S: Final = 1.0
_TOLD_AFTER_S: Final = 10.0
"""Seconds of failure after which an event reports it; shorter ones only show in metrics."""


@dataclass(slots=True)
class UploadReports:
    """Reports of the workers that save checkpoints.

    Args:
        url: URL of the checkpoints.
    """

    url: str
    workers: Sequence[Worker]
    record: Callable[[Note], Awaitable[object]]
    _failing: set[str] = field(default_factory=set, init=False)
    _uploaded: dict[str, int] = field(default_factory=dict, init=False)

    async def watch(self) -> None:
        """Records events until it is cancelled."""
        while True:
            for worker in self.workers:
                for note in self.notes(worker):
                    await self.record(note)
            await asyncio.sleep(_EVERY_S)

    def notes(self, worker: Worker) -> Iterator[Note]:
        """Yields what changed since the last call."""
        name = worker.worker_id
        failing_s = worker.gauges.get(UPLOAD_FAILING_GAUGE, 0.0)
        step = int(worker.gauges.get(UPLOADED_STEP_GAUGE, 0))
        if failing_s >= _TOLD_AFTER_S and name not in self._failing:
            self._failing.add(name)
            text = worker.activity or f"cannot upload a checkpoint for {failing_s:.0f} s"
            message = f"{name}: {text}; training continues, and the checkpoint stays on the trainer's host"
            yield Note("CheckpointUploadFailing", message, {"workers": [name], "url": self.url})
        elif failing_s == 0 and name in self._failing:
            self._failing.discard(name)
            message = f"{name} uploads checkpoints again"
            yield Note("CheckpointUploadResumed", message, {"workers": [name], "url": self.url})
        if step and step != self._uploaded.get(name, 0):
            self._uploaded[name] = step
            data = {"workers": [name], "step": step, "url": self.url}
            yield Note("CheckpointUploaded", f"step {step}: {name} uploaded it to {self.url}", data)
