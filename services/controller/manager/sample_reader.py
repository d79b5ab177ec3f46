"""Reads recorded samples of runs from the transferqueue, a page at a time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import fields

from services.common.errors import NotFoundError, ServiceError
from services.controller.samples import SampleFilter, SampleView, WholeSample
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import SampleRecordQuery

logger = logging.getLogger(__name__)

_FORGET_S = 10.0
_FIELDS = {field.name for field in fields(SampleRecordQuery)}


class SampleReader:
    """Reads recorded samples of all runs.

    Args:
        queue: Client of the transferqueue, which stores them.
    """

    def __init__(self, queue: TransferQueueClient) -> None:
        self._queue = queue

    async def page(
        self, run_id: str, only: SampleFilter, *, after: str, limit: int, excerpt: int
    ) -> list[SampleView]:
        """Returns up to ``limit`` samples after the sample ``after``, with excerpts of their texts."""
        query = _query(only, after=after, limit=limit, excerpt=excerpt)
        lines = await self._read(run_id, query)
        return [SampleView.model_validate_json(line) for line in lines.splitlines()]

    async def one(self, run_id: str, sample_id: str) -> WholeSample:
        """Returns one sample with its turns and tokens.

        Raises:
            NotFoundError: If the sample is not recorded.
        """
        query = SampleRecordQuery(sample_id=sample_id, limit=1, with_turns=True, with_tokens=True)
        line = await self._read(run_id, query)
        if not line:
            raise NotFoundError(
                f"run {run_id} has no recorded sample {sample_id}; list its samples",
                run_id=run_id,
            )
        return WholeSample.model_validate_json(line)

    async def export(
        self, run_id: str, only: SampleFilter, *, limit: int, with_tokens: bool
    ) -> AsyncIterator[bytes]:
        """Returns a stream of whole samples as JSON lines; its first chunk has arrived when this returns."""
        query = _query(only, limit=limit, with_turns=True, with_tokens=with_tokens)
        chunks = self._queue.read_sample_records(run_id, query)
        first = await anext(chunks, b"")

        async def all_chunks() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        return all_chunks()

    async def forget(self, run_id: str) -> None:
        """Deletes the recorded samples of a run; logs a warning if the transferqueue is unavailable."""
        try:
            async with asyncio.timeout(_FORGET_S):
                await self._queue.delete_sample_records(run_id)
        except (ServiceError, TimeoutError) as error:
            # The store's size limit for all runs removes them eventually.
            logger.warning(
                "cannot delete recorded samples", extra={"run": run_id, "reason": str(error)}
            )

    async def _read(self, run_id: str, query: SampleRecordQuery) -> bytes:
        return b"".join([chunk async for chunk in self._queue.read_sample_records(run_id, query)])


def _query(only: SampleFilter, **more: object) -> SampleRecordQuery:
    given = only.model_dump(include=_FIELDS, exclude_none=True)
    return SampleRecordQuery(**(given | more))
