"""Moves samples from the partitions ``records`` of runs into files, out of the queue's memory."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

from services.common.errors import NotFoundError
from services.common.fields import RECORD_FIELDS, partition_id
from services.common.stores import StoredSamples, join_url, open_samples
from services.common.task_group import TaskGroup
from services.transferqueue import metrics
from services.transferqueue.index.index import Index
from services.transferqueue.records.store import SampleRecord, SampleStore, remove_store, store_path
from services.transferqueue.shards import Shards
from services.transferqueue.snapshots.snapshots import BlobClient
from services.wire.batch import MISSING, KVBatchMeta
from services.wire.data.encoding import codec
from services.wire.transferqueue.types import SampleRecordQuery

logger = logging.getLogger(__name__)

_GATHER_S = 1.0
"""Samples that arrive within this time are written together. Readers of records do not wait for it."""
_CHUNK_BYTES = 256 << 10
_LAST_UPLOAD_S = 5.0
"""Max seconds of the process's end in which samples are still uploaded."""
_MAX_READS = 2
"""Reads of sample records that run at once; further ones wait."""


@dataclass(slots=True)
class _Run:
    """A run whose samples are being recorded."""

    max_bytes: int
    max_steps: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    following: asyncio.Task[None] | None = None


class SampleRecordKeeper:
    """Records the samples of all runs.

    Args:
        capacity_bytes: Max bytes of all files; files of ended runs are deleted first, the oldest
            first.
        shards: Hold the bytes until they are recorded.
    """

    def __init__(self, folder: Path, capacity_bytes: int, *, index: Index, shards: Shards) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._index = index
        self._shards = shards
        self._tasks = TaskGroup()
        self._runs: dict[str, _Run] = {}
        self._uploads: dict[str, StoredSamples] = {}
        # Separate threads: searches of users take seconds, and must not delay snapshots and recording.
        self._readers = ThreadPoolExecutor(_MAX_READS, "sample-reader")

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Writes pending samples of all runs."""
        for run_id in list(self._runs):
            await self.stop_recording(run_id)
        deadline = time.monotonic() + _LAST_UPLOAD_S
        for uploads in self._uploads.values():
            await asyncio.to_thread(uploads.wait, max(0.0, deadline - time.monotonic()))
        self._readers.shutdown(wait=False, cancel_futures=True)
        await self._tasks.__aexit__(*error)

    async def start_recording(
        self, run_id: str, *, max_bytes: int, max_steps: int, directory: str = ""
    ) -> None:
        """Creates the partition ``records`` of a run and starts to record its samples.

        Args:
            directory: URL to whose folder of the run they are uploaded; empty for none.

        Raises:
            InvalidArgumentError: If ``run_id`` cannot be a file name.
            FailedPreconditionError: If there is no package for the URL.
        """
        path = store_path(self._folder, run_id)
        if directory:
            # The package's import would hold the event loop.
            if run_id not in self._uploads:
                url = join_url(directory, run_id)
                uploads = await asyncio.to_thread(open_samples, url)
                uploads = self._uploads.setdefault(run_id, uploads)
                gauge = metrics.SAMPLE_UPLOAD_FAILING.labels(run_id)
                gauge.set_function(lambda: uploads.failing_s)
            self._uploads[run_id].follow(path, max_bytes=max_bytes, max_steps=max_steps)
        self._index.create_partition(_partition(run_id), required_fields=(), quota_bytes=0)
        if run_id in self._runs:
            self._runs[run_id].max_bytes, self._runs[run_id].max_steps = max_bytes, max_steps
            return
        run = self._runs[run_id] = _Run(max_bytes, max_steps)
        # Started before the first await: if the caller is cancelled there, samples must still leave the
        # memory.
        run.following = self._tasks.create_task(self._follow(run_id, run), name=f"keep {run_id}")
        await asyncio.to_thread(self._delete_ended_runs, max_bytes, frozenset(self._runs))

    async def stop_recording(self, run_id: str) -> None:
        """Writes a run's pending samples and stops recording; its partition is about to be dropped."""
        await self.flush(run_id)
        run = self._runs.pop(run_id, None)
        if run is not None and run.following is not None:
            run.following.cancel()
        if run_id in self._uploads:
            self._uploads[run_id].finish()

    def upload_failure(self, run_id: str) -> tuple[float, str]:
        """Returns for how many seconds uploads of a run have failed, 0 if none fails, and the first cause."""
        uploads = self._uploads.get(run_id)
        return (0.0, "") if uploads is None else (uploads.failing_s, uploads.cause)

    async def wait_uploaded(self, run_id: str, timeout_s: float) -> bool:
        """Returns True if the store has all samples of a run whose recording has stopped."""
        if timeout_s <= 0:
            return True
        uploads = self._uploads.get(run_id)
        if uploads is None:  # the run has no samples, or this process has restarted
            return not self._path(run_id).exists()
        return await asyncio.to_thread(uploads.wait, timeout_s)

    async def flush(self, run_id: str) -> None:
        """Writes a run's pending samples, if it is being recorded."""
        run = self._runs.get(run_id)
        if run is None:
            return
        async with run.turn:
            if self._runs.get(run_id) is not run:
                return  # it was stopped, with nothing left to write
            pending = self._index.get(_partition(run_id), ())
            if not pending.num_keys:
                return
            try:
                async with BlobClient.connect(self._shards) as blobs:
                    records = await _read_records(pending, blobs)
                await asyncio.to_thread(
                    self._store(run_id).write,
                    records,
                    max_bytes=run.max_bytes,
                    max_steps=run.max_steps,
                )
                metrics.SAMPLE_RECORDS.inc(sum(record.is_from_rollout for record in records))
            except Exception as error:  # noqa: BLE001 -- a run may store anything, and others go on
                metrics.SAMPLE_RECORDS_FAILED.inc(pending.num_keys)
                logger.warning(
                    "storing sample records failed",
                    extra={"run": run_id, "why": type(error).__name__},
                )
            # Releases the samples after a failure, too: training must not wait for their space.
            self._index.release(pending.partition_id, pending.keys)

    async def read(self, run_id: str, query: SampleRecordQuery) -> AsyncIterator[bytes]:
        """Streams sample records as JSON lines, in chunks.

        Raises:
            NotFoundError: If the record of the sample ``query.after`` no longer exists.
        """
        if run_id in self._runs:
            await self.flush(run_id)
        reading = self._store(run_id).lines(query)
        loop = asyncio.get_running_loop()
        while (lines := await loop.run_in_executor(self._readers, next, reading, None)) is not None:
            data = b"".join(lines)
            for begin in range(0, len(data), _CHUNK_BYTES):
                yield data[begin : begin + _CHUNK_BYTES]

    async def delete(self, run_id: str, directory: str = "") -> None:
        """Deletes the samples of a run on the disk, and in an object store if a URL is given."""
        path = self._path(run_id)
        await asyncio.to_thread(remove_store, path)
        if directory:
            uploads = self._uploads.pop(run_id, None)
            if uploads is None:
                uploads = await asyncio.to_thread(open_samples, join_url(directory, run_id))
            else:
                metrics.SAMPLE_UPLOAD_FAILING.remove(run_id)
            await asyncio.to_thread(uploads.delete)
            await asyncio.to_thread(remove_store, path)  # the uploads may have created it

    async def _follow(self, run_id: str, run: _Run) -> None:
        with suppress(NotFoundError):  # a failed restore dropped the partition
            async for _ in self._index.watch(_partition(run_id), 0):
                await asyncio.sleep(_GATHER_S)
                await self.flush(run_id)
        if self._runs.get(run_id) is run:
            del self._runs[run_id]

    def _delete_ended_runs(self, wanted_bytes: int, active_runs: Collection[str]) -> None:
        """Deletes files of ended runs, the oldest first, until ``wanted_bytes`` more fit."""
        files = []
        for path in self._folder.glob("*.db"):
            if path.stem not in active_runs:
                with suppress(FileNotFoundError):  # the start of another run deleted it
                    about = path.stat()
                    files.append((about.st_mtime, about.st_size, path))
        surplus = sum(size for _, size, _ in files) + wanted_bytes - self._capacity_bytes
        for _, size, path in sorted(files):
            if surplus <= 0:
                return
            surplus -= size
            remove_store(path)

    def _store(self, run_id: str) -> SampleStore:
        return SampleStore(self._path(run_id))

    def _path(self, run_id: str) -> Path:
        return store_path(self._folder, run_id)


def _partition(run_id: str) -> str:
    return partition_id(run_id, "records")


async def _read_records(meta: KVBatchMeta, blobs: BlobClient) -> list[SampleRecord]:
    whole = await blobs.read_all(meta.blobs)
    records: list[SampleRecord] = []
    for row, key in enumerate(meta.keys):
        columns: dict[str, bytes] = {}
        for column in meta.fields:
            number, begin = column.blob_indexes[row], column.offsets[row]
            if number != MISSING:
                row_bytes = codec.ITEM_BYTES[column.dtype] * prod(column.tail_shape)
                columns[column.name] = whole[number][
                    begin : begin + column.lengths[row] * row_bytes
                ]
        record = next(columns.pop(name) for name in RECORD_FIELDS if name in columns)
        records.append(
            SampleRecord(
                sample_id=key.partition("/")[0], record=json.loads(record), columns=columns
            )
        )
    return records
