"""Blobs of one shard in shared memory: space is reserved, written, sealed, read, and freed."""

import logging
import mmap
import os
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from services.common.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
)
from services.common.task_group import in_thread
from services.common.telemetry.logging import RareLog
from services.wire.batch import BlobRef
from services.wire.data.encoding.codec import FRAME_BYTES, aligned, checksum, combine

_rare = RareLog(logging.getLogger(__name__))


class Arena:
    """Memory or disk space of a storage shard, allocated in aligned ranges.

    Args:
        capacity_bytes: Size; rounded up to whole pages.
        path: File that backs the arena, for space that the kernel may move out of memory; it is
            unlinked at once so that it disappears with the process. None keeps the arena in memory.
        is_populated: Whether memory is allocated at once.
    """

    def __init__(
        self, capacity_bytes: int, path: Path | None = None, *, is_populated: bool = False
    ) -> None:
        pages = -(-capacity_bytes // mmap.PAGESIZE)
        self.capacity_bytes = pages * mmap.PAGESIZE
        self.is_memory = path is None
        if path is None:
            self.fd = os.memfd_create("slipstream-arena", os.MFD_CLOEXEC)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            path.unlink()
        os.ftruncate(self.fd, self.capacity_bytes)
        populate = mmap.MAP_POPULATE if is_populated else 0
        self._map = mmap.mmap(self.fd, self.capacity_bytes, flags=mmap.MAP_SHARED | populate)
        self.memory = memoryview(self._map)
        self.used_bytes = 0
        self._starts = [0]
        self._sizes = [self.capacity_bytes]

    def close(self) -> None:
        """Releases the memory; no range may be in use."""
        self.memory.release()
        self._map.close()
        os.close(self.fd)

    def write_file(self, start: int, data: memoryview) -> None:
        """Writes a range through the file: on a full disk, writing to the memory would end the process.

        Raises:
            OSError: If the disk is full.
        """
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self.fd, data[num_written:], start + num_written)

    def allocate(self, size_bytes: int) -> int | None:
        """Allocates a range.

        Returns:
            Its position, a multiple of ``ALIGNMENT``; None if no free range is large enough.
        """
        size = aligned(size_bytes)
        for index, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[index]
                if free == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += size
                    self._sizes[index] -= size
                self.used_bytes += size
                return start
        return None

    def free(self, start: int, size_bytes: int) -> None:
        """Frees a range that ``allocate`` returned for this size."""
        size = aligned(size_bytes)
        self.used_bytes -= size
        index = bisect_left(self._starts, start)
        joins_next = index < len(self._starts) and start + size == self._starts[index]
        joins_previous = index > 0 and self._starts[index - 1] + self._sizes[index - 1] == start
        if joins_previous and joins_next:
            self._sizes[index - 1] += size + self._sizes[index]
            del self._starts[index], self._sizes[index]
        elif joins_previous:
            self._sizes[index - 1] += size
        elif joins_next:
            self._starts[index] = start
            self._sizes[index] += size
        else:
            self._starts.insert(index, start)
            self._sizes.insert(index, size)


_PIN_BITS = 62


@dataclass(slots=True)
class _Blob:
    arena: Arena
    start: int
    size: int
    checksum: int | None = None
    num_pins: int = 0
    is_doomed: bool = False
    digests: list[int] = field(default_factory=list)
    """Checksums of the parts that arrived in frames."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Space that is reserved for the blobs of one put."""

    blob_ids: tuple[int, ...]
    positions: tuple[int, ...]


class BlobStore:
    """Stores the blobs of a shard in memory and, if that is full, on disk.

    Args:
        first_blob_id: Greater than any id that a former lifetime of the shard issued.
        spill: Disk space to which the oldest blobs move when the memory is full.
    """

    def __init__(self, arena: Arena, *, first_blob_id: int, spill: Arena | None = None) -> None:
        self._arena = arena
        self._spill = spill
        self._blobs: dict[int, _Blob] = {}
        self._pins: dict[int, tuple[int, ...]] = {}
        self._blob_ids = count(first_blob_id)

    @property
    def used_bytes(self) -> int:
        """Bytes in use in memory and on disk, including reservations."""
        return self._arena.used_bytes + (self._spill.used_bytes if self._spill else 0)

    @property
    def capacity_bytes(self) -> int:
        """Total bytes in memory and on disk."""
        return self._arena.capacity_bytes + (self._spill.capacity_bytes if self._spill else 0)

    def reserve(self, sizes: Sequence[int]) -> Grant | None:
        """Reserves space for the blobs of a put; returns None if there is none now.

        Raises:
            InvalidArgumentError: If the blobs can never fit.
        """
        total = sum(aligned(size) for size in sizes)
        if total > self._arena.capacity_bytes:
            raise InvalidArgumentError(
                f"a put of {total} bytes exceeds the memory of a shard, "
                f"{self._arena.capacity_bytes} bytes; "
                "store fewer samples at once or raise capacity_bytes",
                size_bytes=total,
                capacity_bytes=self._arena.capacity_bytes,
            )
        starts: list[int] = []
        for size in sizes:
            start = self._arena.allocate(size)
            if start is None:
                for position, length in zip(starts, sizes, strict=False):
                    self._arena.free(position, length)
                return None
            starts.append(start)
        blob_ids = tuple(next(self._blob_ids) for _ in sizes)
        for blob_id, start, size in zip(blob_ids, starts, sizes, strict=True):
            self._blobs[blob_id] = _Blob(self._arena, start, size)
        return Grant(blob_ids, tuple(starts))

    async def spill(self, size_bytes: int) -> bool:
        """Moves the oldest idle blobs to disk until about ``size_bytes`` are free; False if it moved none."""
        moved_bytes = 0
        for blob_id, blob in list(self._blobs.items()) if self._spill else ():
            is_idle = blob.checksum is not None and blob.num_pins == 0 and not blob.is_doomed
            if moved_bytes < size_bytes and is_idle and blob.arena.is_memory:
                assert self._spill is not None
                try:
                    moved_bytes += blob.size * await self._move_to_disk(self._spill, blob_id, blob)
                except OSError as error:
                    _rare.warning("samples stay in memory", error=str(error))
                    break
        return moved_bytes > 0

    def write(self, blob_id: int, offset: int, data: memoryview) -> None:
        """Writes a part of a reserved blob; the frames of a blob arrive in order.

        Raises:
            InvalidArgumentError: If the bytes do not continue a blob that is being written.
        """
        blob = self._blobs.get(blob_id)
        if blob is None or blob.checksum is not None:
            raise InvalidArgumentError(f"blob {blob_id} is not being written", blob_id=blob_id)
        num_parts = len(blob.digests)
        if offset != num_parts * FRAME_BYTES or len(data) != min(FRAME_BYTES, blob.size - offset):
            raise InvalidArgumentError(
                f"unexpected {len(data)} bytes at offset {offset} of blob {blob_id} with {blob.size} bytes, "
                f"which has {num_parts} parts of {FRAME_BYTES} bytes",
                blob_id=blob_id,
            )
        begin = blob.start + offset
        blob.arena.memory[begin : begin + len(data)] = data
        blob.digests.append(checksum(data))

    async def seal(self, sealed: Sequence[BlobRef]) -> None:
        """Completes the blobs of a put, which the sender describes.

        Blobs that arrived through ``write`` are verified here. Blobs that the client wrote directly
        into the arena are verified by their readers.

        Raises:
            DataLossError: If the received bytes differ from the sent ones.
        """
        for ref in sealed:
            _check_frames(self._blobs[ref.blob_id], ref)
        for ref in sealed:
            self._blobs[ref.blob_id].checksum = ref.checksum

    def free(self, blob_ids: Iterable[int]) -> None:
        """Deletes blobs; a pinned blob is deleted after its readers have finished."""
        for blob_id in blob_ids:
            blob = self._blobs.get(blob_id)
            if blob is None:
                continue
            blob.is_doomed = True
            self._collect(blob_id, blob)

    async def views(self, ranges: Sequence[tuple[int, int, int]]) -> list[memoryview]:
        """Returns bytes of sealed blobs, ``(blob_id, offset, size)`` each.

        Raises:
            NotFoundError: If there is no such blob.
            InvalidArgumentError: If a range is not inside its blob.
        """
        return [self._view(*extent) for extent in ranges]

    def positions(self, ranges: Sequence[tuple[int, int, int]]) -> tuple[int, ...] | None:
        """Returns the arena positions of ranges ``(blob_id, offset, size)``; None if some are on disk.

        Raises:
            NotFoundError: If there is no such blob.
            InvalidArgumentError: If a range is not inside its blob.
        """
        blobs = [self._find(*extent) for extent in ranges]
        if not all(blob.arena.is_memory for blob in blobs):
            return None
        return tuple(
            [blob.start + offset for blob, (_, offset, _) in zip(blobs, ranges, strict=True)]
        )

    def pin(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Pins the blobs of ranges ``(blob_id, offset, size)`` in place for a reader.

        Raises:
            NotFoundError: If there is no such blob.
        """
        # Anyone who knows the number can release the pin, so another run must not be able to guess
        # it.
        pin_id = 1 + secrets.randbits(_PIN_BITS)
        blob_ids = tuple({blob_id for blob_id, _, _ in ranges})
        for blob_id in blob_ids:
            self._find(blob_id, 0, 0)
        for blob_id in blob_ids:
            self._blobs[blob_id].num_pins += 1
        self._pins[pin_id] = blob_ids
        return pin_id

    def unpin(self, pin_id: int) -> None:
        """Releases a pin; has no effect on one that expired."""
        for blob_id in self._pins.pop(pin_id, ()):
            blob = self._blobs[blob_id]
            blob.num_pins -= 1
            self._collect(blob_id, blob)

    def _view(self, blob_id: int, offset: int, size: int) -> memoryview:
        blob = self._find(blob_id, offset, size)
        begin = blob.start + offset
        return blob.arena.memory[begin : begin + size]

    async def _move_to_disk(self, spill: Arena, blob_id: int, blob: _Blob) -> bool:
        start = spill.allocate(blob.size)
        if start is None:
            return False
        data, is_moved = blob.arena.memory[blob.start : blob.start + blob.size], False
        blob.num_pins += 1
        try:
            await in_thread(partial(spill.write_file, start, data))
            is_moved = blob.num_pins == 1  # a reader that pinned it meanwhile reads the old range
        finally:
            if is_moved:
                blob.arena.free(blob.start, blob.size)
                blob.arena, blob.start = spill, start
            else:
                spill.free(start, blob.size)
            blob.num_pins -= 1
            self._collect(blob_id, blob)
        return is_moved

    def _find(self, blob_id: int, offset: int, size: int) -> _Blob:
        blob = self._blobs.get(blob_id)
        if blob is None or blob.checksum is None or blob.is_doomed:
            raise NotFoundError(
                f"blob {blob_id} not found; its samples were released", blob_id=blob_id
            )
        if offset + size > blob.size:
            raise InvalidArgumentError(
                f"bytes {offset} to {offset + size} are outside blob {blob_id} of {blob.size} bytes",
                blob_id=blob_id,
            )
        return blob

    def _collect(self, blob_id: int, blob: _Blob) -> None:
        if blob.is_doomed and blob.num_pins == 0:
            blob.arena.free(blob.start, blob.size)
            del self._blobs[blob_id]


def _check_frames(blob: _Blob, ref: BlobRef) -> None:
    check_arrived(ref, blob.size, combine(blob.digests) if blob.digests else None)


def check_arrived(ref: BlobRef, size_bytes: int, digest: int | None) -> None:
    """Compares a received blob with its sender's description.

    Args:
        ref: The sender's description.
        size_bytes: The size that was reserved.
        digest: Checksum of the bytes that arrived in frames; None if the client wrote them
            elsewhere.

    Raises:
        InvalidArgumentError: If the size differs.
        DataLossError: If the bytes differ.
    """
    if ref.size_bytes != size_bytes:
        raise InvalidArgumentError(
            f"blob {ref.blob_id} has {size_bytes} bytes, expected {ref.size_bytes}",
            blob_id=ref.blob_id,
        )
    if digest is not None and digest != ref.checksum:
        raise DataLossError(
            f"blob {ref.blob_id} arrived with checksum {digest:#x}, expected "
            f"{ref.checksum:#x}; send it again",
            blob_id=ref.blob_id,
        )
