"""Pool of buffers for reads, which are reused when no tensor views them any more.

A page fault costs about four copies of the page, and one batch spans hundreds of pages.
"""

import ctypes
import mmap
import threading
import weakref

import torch
from torch import Tensor

_MIN_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 2 << 20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class BufferPool:
    """Allocates buffers and takes them back when their tensors are garbage-collected.

    Args:
        keep_bytes: Max. unused memory that the pool keeps.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[mmap.mmap] = []
        # Finalizers may run in any thread.
        self._lock = threading.RLock()

    def take(self, size_bytes: int) -> Tensor:
        """Returns a uint8 tensor of ``size_bytes``; its memory returns to the pool with its last view."""
        with self._lock:
            block = self._block(size_bytes)
        holder = (ctypes.c_char * max(size_bytes, 1)).from_buffer(block)
        weakref.finalize(holder, self._return_block, block).atexit = False
        return torch.frombuffer(holder, dtype=torch.uint8, count=max(size_bytes, 1))[:size_bytes]

    def _block(self, size_bytes: int) -> mmap.mmap:
        # Prefer the most recently used block: it is still in the cache.
        idle = reversed(self._idle)
        fitting = [b for b in idle if size_bytes <= len(b) <= 2 * size_bytes + _MIN_BYTES]
        if fitting:
            block = min(fitting, key=len)
            self._idle.remove(block)
            return block
        if size_bytes < _HUGE_PAGE_BYTES:
            return mmap.mmap(-1, max(_MIN_BYTES, size_bytes), flags=_FLAGS | mmap.MAP_POPULATE)
        block = mmap.mmap(-1, size_bytes, flags=_FLAGS)
        # Huge pages cause hundreds of times fewer page faults and are copied a quarter faster.
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _return_block(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(block)
            while self._idle and sum(map(len, self._idle)) > self._keep_bytes:
                self._idle.pop(0)
