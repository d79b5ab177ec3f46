"""Tests of the buffer pool."""

import gc

import torch

from services.wire.data.client import BufferPool


def test_memory_returns_to_the_pool_with_the_last_view() -> None:
    pool = BufferPool(1 << 20)
    first = pool.allocate(100_000)
    view = first[10:20].view(torch.uint8)
    address = first.data_ptr()
    del first
    gc.collect()
    assert pool.allocate(100_000).data_ptr() != address
    del view
    gc.collect()
    assert address in {
        pool.allocate(100_000).data_ptr(),
        *[t.data_ptr() for t in [pool.allocate(100_000)]],
    }


def test_the_pool_keeps_at_most_its_limit() -> None:
    pool = BufferPool(150_000)
    buffers = [pool.allocate(100_000) for _ in range(3)]
    del buffers
    gc.collect()
    assert sum(map(len, pool._idle)) <= 150_000


def test_an_empty_buffer_is_fine() -> None:
    assert len(BufferPool(0).allocate(0)) == 0
