"""Copies the frames of a read to their positions as they arrive."""

from collections.abc import Sequence

import xxhash

from services.common.errors import DataLossError
from services.wire.data.encoding import codec
from services.wire.data.encoding.readplan import Extent


class Arrival:
    """Assembles the answer to one read.

    Args:
        batch: Parts of extents, which arrive one after the other.
        view: Target buffer.
        with_checksum: Also compute the checksum of all frames.
    """

    def __init__(self, batch: Sequence[Extent], view: memoryview, *, with_checksum: bool) -> None:
        self._batch = batch
        self._view = view
        self._hash = xxhash.xxh3_64() if with_checksum else None
        self._digests: list[int] = []
        self._done = 0
        self._num_excess = 0

    def take(self, frames: Sequence[memoryview]) -> None:
        """Copies frames; computes each complete part's checksum while the part is in the cache."""
        for frame in frames:
            if self._hash is not None:
                self._hash.update(frame)
            used = 0
            while used < len(frame) and len(self._digests) < len(self._batch):
                used += self._copy_part(frame[used:])
            self._num_excess += len(frame) - used

    def digests(self, answer: codec.Response) -> list[int]:
        """Returns the checksums of the parts; call it after the last frame.

        Raises:
            DataLossError: If the frames differ from those requested and sent.
        """
        is_right = (
            isinstance(answer, codec.Data)
            and len(self._digests) == len(self._batch)
            and self._num_excess == 0
            and (self._hash is None or self._hash.intdigest() == answer.checksum)
        )
        if not is_right:
            shard_id = self._batch[0].blob.shard_id
            raise DataLossError(
                f"a read from shard {shard_id} arrived corrupted; retry", shard_id=shard_id
            )
        return self._digests

    def _copy_part(self, data: memoryview) -> int:
        extent = self._batch[len(self._digests)]
        size = min(extent.size - self._done, len(data))
        begin = extent.position + self._done
        self._view[begin : begin + size] = data[:size]
        self._done += size
        if self._done == extent.size:
            part = self._view[extent.position : extent.position + extent.size]
            self._digests.append(codec.checksum(part))
            self._done = 0
        return size
