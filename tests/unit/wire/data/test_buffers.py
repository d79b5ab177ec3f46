"""Memory that is used again."""

import gc

import torch

from services.wire.data.transport.buffers import BufferPool


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = BufferPool(1 << 20)
    first = pool.take(100_000)
    view = first[10:20].view(torch.uint8)
    address = first.data_ptr()
    del first
    gc.collect()
    assert pool.take(100_000).data_ptr() != address
    del view
    gc.collect()
    assert address in {pool.take(100_000).data_ptr(), *[t.data_ptr() for t in [pool.take(100_000)]]}


def test_no_more_than_the_limit_is_kept() -> None:
    pool = BufferPool(150_000)
    buffers = [pool.take(100_000) for _ in range(3)]
    del buffers
    gc.collect()
    assert sum(map(len, pool._idle)) <= 150_000


def test_an_empty_buffer_is_fine() -> None:
    assert len(BufferPool(0).take(0)) == 0
