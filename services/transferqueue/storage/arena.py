"""Allocator over one pre-faulted block of shared memory.

A page fault costs about four copies of the page, so the arena is faulted in once at start and its
ranges are reused. Other processes of the host map the same memory through ``fd``.
"""

import mmap
import os
from bisect import bisect_left
from pathlib import Path

from services.wire.data.encoding.codec import aligned


class Arena:
    """Memory or disk space of a storage shard, allocated in aligned ranges.

    Args:
        capacity_bytes: Size; rounded up to whole pages.
        path: File that backs the arena, for space that the kernel may move out of memory; it is
            unlinked at once so that it disappears with the process. None keeps the arena in memory.
    """

    def __init__(self, capacity_bytes: int, path: Path | None = None) -> None:
        pages = -(-capacity_bytes // mmap.PAGESIZE)
        self.capacity_bytes = pages * mmap.PAGESIZE
        self.is_memory = path is None
        if path is None:
            self.fd = os.memfd_create("slipstream-arena", os.MFD_CLOEXEC)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            path.unlink()
        os.ftruncate(self.fd, self.capacity_bytes)
        populate = mmap.MAP_POPULATE if self.is_memory else 0
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
