"""Events about uploads of samples to an object store: they fail, or work again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from services.common.errors import ServiceError
from services.controller.store.records import Note
from services.extras.objects.transfers import TOLD_AFTER_S

_EVERY_S: Final = 5.0

_LAST_S: Final = 10.0
"""Seconds that the end of a run waits for its last samples."""


async def report_samples(
    url: str,
    sample_upload: Callable[..., Awaitable[tuple[bool, float, str]]],
    record: Callable[[Note], Awaitable[object]],
    *,
    is_last: bool = False,
) -> None:
    """Records events about uploads of samples until it is cancelled.

    Args:
        sample_upload: ``TransferQueueClient.sample_upload`` of the run.
        is_last: True to record, once, if the store has all samples of the ended run.
    """
    if is_last:
        await record(await _last_note(url, sample_upload))
        return
    is_failing = False
    while True:
        try:
            _, failing_s, cause = await sample_upload()
        except ServiceError:
            pass  # the transferqueue does not answer, which others report
        else:
            if failing_s >= TOLD_AFTER_S and not is_failing:
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
        await asyncio.sleep(_EVERY_S)


async def _last_note(
    url: str, sample_upload: Callable[..., Awaitable[tuple[bool, float, str]]]
) -> Note:
    try:
        is_pending, _, cause = await sample_upload(wait_s=_LAST_S)
    except ServiceError as error:
        is_pending, cause = True, error.message
    if not is_pending:
        return Note("SamplesUploaded", f"{url} has all samples of the run", {"url": url})
    cause = (
        cause
        or f"the upload takes more than {_LAST_S:.0f} s, or the transferqueue has restarted meanwhile"
    )
    message = (
        f"{url} lacks samples of the run: {cause}; an upload goes on for half an hour more, and the samples "
        "stay in their file on the transferqueue's disk"
    )
    return Note("SamplesNotUploaded", message, {"url": url})
