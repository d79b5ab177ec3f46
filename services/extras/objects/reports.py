"""Events about uploads of samples to an object store: they fail, or work again."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from services.common.errors import ServiceError
from services.controller.store.records import Note
from services.extras.objects.transfers import Outage

_EVERY_S: Final = 5.0

_LAST_S: Final = 10.0
"""Seconds that the end of a run waits for its last samples."""


@dataclass(frozen=True, slots=True)
class SampleReports:
    """Records events about the uploads of a run's samples.

    Args:
        url: URL of the samples.
        sample_upload: ``TransferQueueClient.sample_upload`` of the run.
        record: Records an event.
    """

    url: str
    sample_upload: Callable[..., Awaitable[tuple[bool, float, str]]]
    record: Callable[[Note], Awaitable[object]]

    async def watch(self) -> None:
        """Records when uploads fail and when they work again, until it is cancelled."""
        outage = Outage()
        while True:
            try:
                _, failing_s, cause = await self.sample_upload()
            except ServiceError:
                pass  # the transferqueue does not answer, which others report
            else:
                match outage.changed(failing_s):
                    case "failing":
                        await self._record(
                            "SampleUploadFailing",
                            f"the transferqueue cannot upload samples for {failing_s:.0f} s: {cause}; "
                            "training continues, and the samples stay in their file on its disk",
                        )
                    case "resumed":
                        message = "the transferqueue uploads samples again"
                        await self._record("SampleUploadResumed", message)
            await asyncio.sleep(_EVERY_S)

    async def record_end(self) -> None:
        """Records if the store has all samples of the ended run."""
        try:
            is_pending, _, cause = await self.sample_upload(wait_s=_LAST_S)
        except ServiceError as error:
            is_pending, cause = True, error.message
        if not is_pending:
            await self._record("SamplesUploaded", f"{self.url} has all samples of the run")
            return
        cause = (
            cause
            or f"the upload takes more than {_LAST_S:.0f} s, or the transferqueue has restarted meanwhile"
        )
        await self._record(
            "SamplesNotUploaded",
            f"{self.url} lacks samples of the run: {cause}; an upload goes on for half an hour more, and "
            "the samples stay in their file on the transferqueue's disk",
        )

    async def _record(self, kind: str, message: str) -> None:
        await self.record(Note(kind, message, {"url": self.url}))
