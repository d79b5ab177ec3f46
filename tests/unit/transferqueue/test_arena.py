"""Tests of the allocator of a shard's memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.transferqueue.storage.blobs import Arena
from services.wire.data.encoding.codec import aligned


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 16)
    yield arena
    arena.close()


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9000)), max_size=60))
def test_ranges_never_overlap_and_all_memory_is_freed(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(1 << 16)
    allocated: dict[int, int] = {}
    for is_allocation, number in steps:
        if is_allocation:
            start = arena.allocate(number)
            if start is None:
                continue
            assert start % 64 == 0
            end = start + aligned(number)
            assert all(end <= s or start >= s + aligned(n) for s, n in allocated.items())
            allocated[start] = number
        elif allocated:
            start = sorted(allocated)[number % len(allocated)]
            arena.free(start, allocated.pop(start))
        assert arena.used_bytes == sum(map(aligned, allocated.values()))
    for start, size in allocated.items():
        arena.free(start, size)
    assert arena.allocate(1 << 16) == 0
    arena.close()


def test_a_full_arena_raises_an_error(arena: Arena) -> None:
    assert arena.allocate(1 << 16) == 0
    assert arena.allocate(1) is None


def test_an_arena_on_disk_leaves_no_file(tmp_path: Path) -> None:
    arena = Arena(1 << 16, tmp_path / "spill")
    arena.memory[:3] = b"abc"
    assert list(tmp_path.iterdir()) == []
    assert not arena.is_memory
    arena.close()
