"""Weights that arrive at a server, in memory that its workers can open; verified before they are loaded."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from services.weightsync.arena import source_digest
from services.weightsync.checksum import write_checksum
from services.weightsync.weight_plan import TensorSpec, WeightPlan, make_plan

_NAME: Final = "slipstream-weights"


def is_received_memory(path: str) -> bool:
    """Returns False if the path is not that of a :class:`SharedMemory` of this host."""
    try:
        return _NAME in os.readlink(path)  # noqa: PTH115 -- a link to no file
    except OSError:
        return False


class SharedMemory:
    """Memory without a file name, which ends with this process; other processes of the host open its path."""

    def __init__(self, num_bytes: int) -> None:
        self.on_close: Callable[[str], None] | None = None
        """Called with the path when the memory is freed."""
        self._file = os.memfd_create(_NAME)
        try:
            os.truncate(self._file, num_bytes)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
            self.buffer = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory once no process uses it; does nothing the second time."""
        file, self._file = self._file, -1
        if file >= 0:
            if self.on_close is not None:
                self.on_close(self.path)  # before other memory can get the path
            os.close(file)


class StagedWeights:
    """One announced version, whose buckets arrive in any order.

    Args:
        version: Weight version.
        tensors: All tensors, in sending order.
        bucket_bytes: Max bytes of a bucket.
        memory: Memory of an earlier version, used again if it has the same size.

    Raises:
        ValueError: If there is no such plan.
    """

    def __init__(
        self,
        version: int,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        memory: SharedMemory | None = None,
    ) -> None:
        self.version = version
        self.plan: WeightPlan = make_plan(tensors, bucket_bytes)
        (self._layout,) = self.plan.sources
        if memory is not None and memory.buffer.nbytes != self._layout.arena_bytes:
            memory.close()
            memory = None
        self.memory = memory or SharedMemory(self._layout.arena_bytes)
        self._sums = torch.zeros(self.num_buckets, 2, dtype=torch.int64)
        self._missing = set(range(self.num_buckets))
        self._begun: set[int] = set()

    @property
    def num_buckets(self) -> int:
        return len(self._layout.buckets)

    @property
    def missing(self) -> int:
        """Number of buckets that have not arrived."""
        return len(self._missing)

    def begin(self, index: int) -> Tensor:
        """Returns the bytes of a bucket, ``[n]`` uint8, to write into.

        Each bucket has one writer, so that its bytes are those of its checksum.

        Raises:
            IndexError: If there is no such bucket.
            ValueError: If the bucket has arrived, arrives now, or was interrupted.
        """
        if not 0 <= index < self.num_buckets:
            raise IndexError(
                f"the version has {self.num_buckets} buckets, not one of number {index}"
            )
        if index in self._begun:
            raise ValueError(f"bucket {index} of version {self.version} was sent before")
        self._begun.add(index)
        return self._bytes(index)

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns the first byte of a bucket in the memory, and the one after its last."""
        bucket = self._layout.buckets[index]
        return bucket.start, bucket.stop

    def finish(self, index: int) -> None:
        """Computes the checksum of a bucket that has arrived. Blocks."""
        sums = torch.zeros(2, dtype=torch.int64)
        write_checksum(self._bytes(index), sums)
        self._sums[index] = sums
        self._missing.discard(index)

    def _bytes(self, index: int) -> Tensor:
        start, stop = self.bounds(index)
        return self.memory.buffer[start:stop]

    def digest(self) -> str:
        """Returns the hex digest of the bytes that arrived: equal to the sender's only for equal weights."""
        return source_digest(self.plan.plan_hash, self.version, 0, self._sums)

    def description(self) -> str:
        """Returns the description that ``shared_tensors.open_shared`` takes in the server's workers."""
        entries: list[Any] = []
        for shard, offset in zip(self._layout.shards, self._layout.offsets, strict=True):
            spec = self.plan.tensors[shard.tensor]
            entries.append([spec.name, 0, offset, list(spec.shape), spec.dtype])
        return json.dumps(
            {
                "path": self.memory.path,
                "size": self._layout.arena_bytes,
                "tensors": json.dumps(entries),
            }
        )
