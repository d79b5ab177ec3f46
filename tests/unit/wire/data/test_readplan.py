"""Tests of the byte ranges of a read."""

import pytest

from services.common.errors import NotFoundError
from services.wire.batch import MISSING, BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding.readplan import ReadPlan, plan_read


def plan_of(
    rows: list[tuple[int, int, int]], *, dtype: str = "int32", tail: tuple[int, ...] = ()
) -> ReadPlan:
    """Returns the plan to read rows, which are given as (blob index, offset, length)."""
    column = FieldColumn(
        name="x",
        dtype=dtype,
        row_rank=1,
        tail_shape=tail,
        lengths=tuple(length for _, _, length in rows),
        blob_indexes=tuple(index for index, _, _ in rows),
        offsets=tuple(offset for _, offset, _ in rows),
    )
    blobs = tuple(
        BlobRef(shard_id="s", blob_id=number, size_bytes=1000, checksum=0) for number in range(2)
    )
    keys = tuple(f"k{n}" for n in range(len(rows)))
    meta = KVBatchMeta(partition_id="p", keys=keys, fields=(column,), blobs=blobs)
    return plan_read(meta, ["x"])


def extents(plan: ReadPlan) -> list[tuple[int, int, int, int]]:
    return [(e.blob.blob_id, e.offset, e.size, e.position) for e in plan.extents]


def test_rows_that_follow_each_other_are_one_read() -> None:
    plan = plan_of([(0, 0, 2), (0, 8, 3), (0, 20, 1)])
    assert extents(plan) == [(0, 0, 24, 0)]
    assert plan.columns[0][1:] == (0, 24)
    assert plan.size_bytes == 64


def test_other_orders_and_blobs_are_reads_of_their_own() -> None:
    plan = plan_of([(0, 8, 2), (0, 0, 2), (1, 8, 1)])
    assert extents(plan) == [(0, 8, 8, 0), (0, 0, 8, 8), (1, 8, 4, 16)]


def test_a_shared_row_is_read_once_and_copied() -> None:
    plan = plan_of([(0, 0, 2), (0, 0, 2), (0, 0, 2)])
    assert extents(plan) == [(0, 0, 8, 0)]
    assert plan.copies == [(0, 8, 8), (8, 16, 8)]


def test_empty_rows_need_no_bytes() -> None:
    plan = plan_of([(0, 0, 0), (0, 0, 0)])
    assert (plan.extents, plan.copies, plan.columns[0][1:]) == ([], [], (0, 0))


def test_tail_dimensions_and_dtype_give_the_size_of_a_row() -> None:
    assert extents(plan_of([(0, 0, 2)], dtype="bfloat16", tail=(3, 5))) == [(0, 0, 60, 0)]


def test_a_key_without_the_field_is_named() -> None:
    with pytest.raises(NotFoundError, match="'x': k1"):
        plan_of([(0, 0, 2), (MISSING, 0, 0)])
