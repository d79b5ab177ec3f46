"""Events about uploads to an object store: they fail, or work again; a checkpoint was uploaded."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.common.errors import ServiceError
from services.controller.membership import Worker
from services.controller.store.records import Note
from services.wire.controller import UPLOAD_FAILING_GAUGE, UPLOAD_FAILS, UPLOADED_STEP_GAUGE

_EVERY_S: Final = 1.0
_SAMPLES_EVERY_S: Final = 5.0
_TOLD_AFTER_S: Final = 10.0
"""Seconds of failure after which an event reports it; shorter ones only show in metrics."""

_Record = Callable[[Note], Awaitable[object]]


@dataclass(slots=True)
class CheckpointReports:
    """Reports of the workers that save checkpoints.

    Args:
        url: URL of the checkpoints.
    """

    url: str
    workers: Sequence[Worker]
    record: _Record
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
        has_cause = worker.activity.startswith(UPLOAD_FAILS)  # a save may hide it for a moment
        if failing_s >= _TOLD_AFTER_S * (1 if has_cause else 6) and name not in self._failing:
            self._failing.add(name)
            text = worker.activity if has_cause else f"{UPLOAD_FAILS} for {failing_s:.0f} s"
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


async def report_checkpoints(url: str, workers: Sequence[Worker], record: _Record) -> None:
    """Records events about uploads of checkpoints until it is cancelled."""
    await CheckpointReports(url, workers, record).watch()


async def report_samples(
    url: str, failure: Callable[[], Awaitable[tuple[float, str]]], record: _Record
) -> None:
    """Records events about uploads of samples until it is cancelled.

    Args:
        failure: Returns for how many seconds uploads have failed, 0 if they work, and the first cause.
    """
    is_failing = False
    while True:
        try:
            failing_s, cause = await failure()
        except ServiceError:
            pass  # the transferqueue does not answer, which others report
        else:
            if failing_s >= _TOLD_AFTER_S and not is_failing:
                is_failing = True
                message = (
                    f"the transferqueue cannot upload samples for {failing_s:.0f} s: {cause}; training "
                    "continues, and the samples stay in their file on its disk"
                )
                await record(Note("SampleUploadFailing", message, {"url": url}))
            elif failing_s == 0 and is_failing:
                is_failing = False
                message = "the transferqueue uploads samples again"
                await record(Note("SampleUploadResumed", message, {"url": url}))
        await asyncio.sleep(_SAMPLES_EVERY_S)
