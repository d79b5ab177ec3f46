"""Blobs of a shard whose bytes are in Mooncake Store.

Clients transfer the bytes themselves; the shard issues ids, counts bytes, and deletes. The blobs of
a put form one object, as small objects are slow; a blob's id encodes its object and position.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count

from services.common.errors import InvalidArgumentError, NotFoundError
from services.transferqueue.storage.blobs import Grant, check_arrived
from services.wire.batch import BlobRef
from services.wire.data.channels.object_store import (
    PLACE_BITS,
    ObjectStore,
    object_place,
    object_range,
)
from services.wire.data.encoding.codec import ALIGNMENT, aligned, blob_checksum

_USABLE_SHARE = 0.9
"""Usable fraction of the memory: the store's allocator refuses requests before it is full."""


class ObjectStorage:
    """Stores the blobs of a shard in Mooncake Store.

    Args:
        store: The store.
        instance_id: Identifies this lifetime of the shard; part of the objects' keys.
        capacity_bytes: Memory that the shard contributes to the store.
    """

    def __init__(self, store: ObjectStore, *, instance_id: str, capacity_bytes: int) -> None:
        self._store = store
        self._instance_id = instance_id
        self.capacity_bytes = int(capacity_bytes * _USABLE_SHARE)
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._sealed: set[int] = set()
        self._received: dict[int, bytearray] = {}
        self._numbers = count(1)
        self._alive: Counter[int] = Counter()
        self._thread = ThreadPoolExecutor(max_workers=1)

    def close(self) -> None:
        """Finishes deletions and disconnects from the store."""
        self._thread.shutdown()
        self._store.close()

    def reserve(self, sizes: Sequence[int]) -> Grant | None:
        """Reserves space for the blobs of a put; returns None if there is none now.

        Raises:
            InvalidArgumentError: If the blobs can never fit.
        """
        total = sum(map(aligned, sizes))
        if total > self.capacity_bytes:
            raise InvalidArgumentError(
                f"a put of {total} bytes exceeds the shard's {self.capacity_bytes} bytes; store "
                "fewer samples at once or raise capacity_bytes"
            )
        if self.used_bytes + total > self.capacity_bytes:
            return None
        self.used_bytes += total
        number = next(self._numbers)
        starts = accumulate(map(aligned, sizes[:-1]), initial=0)
        blob_ids = tuple((number << PLACE_BITS) + start // ALIGNMENT for start in starts)
        self._alive[number] = len(blob_ids)
        self._sizes.update(zip(blob_ids, sizes, strict=True))
        return Grant(blob_ids, (0,) * len(sizes))

    def write(self, blob_id: int, offset: int, data: memoryview) -> None:
        """Receives a frame of a blob from a client that does not use the store itself.

        Raises:
            InvalidArgumentError: If the bytes do not continue a blob that is being written.
        """
        received = self._received.setdefault(blob_id, bytearray())
        is_open = blob_id in self._sizes and blob_id not in self._sealed
        if not is_open or offset != len(received) or offset + len(data) > self._sizes[blob_id]:
            raise InvalidArgumentError(f"unexpected {len(data)} bytes for blob {blob_id}")
        received += data

    async def seal(self, sealed: Sequence[BlobRef]) -> None:
        """Completes the blobs of a put.

        Raises:
            DataLossError: If the received bytes differ from the sent ones.
        """
        received = [(ref, self._received.pop(ref.blob_id, None)) for ref in sealed]
        for ref, data in received:
            digest = None if data is None else blob_checksum(data)
            check_arrived(ref, self._sizes[ref.blob_id], digest)
        if any(data is not None for _, data in received):
            key, _ = object_place(self._instance_id, sealed[0].blob_id)
            await self._run(_store_all, self._store, key, [data or b"" for _, data in received])
        self._sealed.update(ref.blob_id for ref in sealed)

    def free(self, blob_ids: Iterable[int]) -> None:
        """Deletes blobs."""
        known = [blob_id for blob_id in blob_ids if blob_id in self._sizes]
        for blob_id in known:
            self.used_bytes -= aligned(self._sizes.pop(blob_id))
            self._sealed.discard(blob_id)
            self._received.pop(blob_id, None)
        numbers = [blob_id >> PLACE_BITS for blob_id in known]
        self._alive.subtract(numbers)
        for number in {number for number in numbers if self._alive[number] == 0}:
            del self._alive[number]
            self._thread.submit(self._store.remove, [f"{self._instance_id}/{number}"])

    async def views(self, ranges: Sequence[tuple[int, int, int]]) -> list[memoryview]:
        """Returns bytes of sealed blobs, ``(blob_id, offset, size)`` each.

        Raises:
            NotFoundError: If there is no such blob.
        """
        for blob_id, offset, size in ranges:
            if blob_id not in self._sealed or offset + size > self._sizes[blob_id]:
                raise NotFoundError(f"blob {blob_id} not found; its samples were released")
        data = memoryview(bytearray(sum(size for _, _, size in ranges)))
        keyed = [
            object_range(self._instance_id, blob_id, offset, size)
            for blob_id, offset, size in ranges
        ]
        await self._run(self._store.read, keyed, data)
        return [data]

    async def spill(self, size_bytes: int) -> bool:
        """Returns False: the store cannot spill blobs."""
        return False

    def positions(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Returns None: these blobs are not in mappable memory."""

    def pin(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Returns 0: ``views`` returns copies, so no pin is needed."""
        return 0

    def unpin(self, pin_id: int) -> None:
        """Does nothing, as there are no pins."""

    async def _run(self, work: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _store_all(store: ObjectStore, key: str, blobs: Sequence[bytes | bytearray]) -> None:
    def fill(views: Sequence[memoryview]) -> None:
        for view, data in zip(views, blobs, strict=True):
            view[:] = data

    store.write(key, [len(data) for data in blobs], fill)
