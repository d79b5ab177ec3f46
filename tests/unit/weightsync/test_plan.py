"""Tests of weight plans, which define the position of each tensor in the transfer."""

from dataclasses import replace

import pytest

from services.weightsync.weight_plan import (
    ALIGNMENT,
    TensorSpec,
    WeightShard,
    make_plan,
    row_shards,
)
from tests.helpers.weight_members import SPECS


def test_buckets_cover_each_arena():
    plan = make_plan(SPECS, 10_000, row_shards(SPECS, 2))
    for source in plan.sources:
        assert [bucket.start for bucket in source.buckets] == list(
            range(0, source.arena_bytes, 8192)
        )
        assert source.buckets[-1].stop == source.arena_bytes
        assert all(offset % ALIGNMENT == 0 for offset in source.offsets)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 400])
def test_row_shards_cover_every_row_once(num_ranks):
    shards = row_shards(SPECS, num_ranks)
    rows = [
        (shard.tensor, row)
        for rank in shards
        for shard in rank
        for row in range(shard.start, shard.stop)
    ]
    assert len(rows) == len(set(rows)) == sum(spec.num_rows for spec in SPECS)


def test_holders_divide_their_tensors_among_themselves():
    tensors = (
        TensorSpec("first", (5, 2), "float32", holders=(0, 1)),
        TensorSpec("last", (4,), "float32", holders=(3, 2)),
        TensorSpec("all", (4,), "float32"),
    )
    shards = row_shards(tensors, 4)
    assert shards == (
        (WeightShard(0, 0, 3), WeightShard(2, 0, 1)),
        (WeightShard(0, 3, 5), WeightShard(2, 1, 2)),
        (WeightShard(1, 2, 4), WeightShard(2, 2, 3)),
        (WeightShard(1, 0, 2), WeightShard(2, 3, 4)),
    )
    other = (replace(tensors[0], holders=(1, 0)), *tensors[1:])
    hashes = {
        make_plan(layout, 1 << 20, row_shards(layout, 4)).plan_hash for layout in (tensors, other)
    }
    assert len(hashes) == 2


@pytest.mark.parametrize("holders", [(0, 2), (1, 1), (-1,)])
def test_holders_that_are_no_sources_are_refused(holders):
    with pytest.raises(ValueError, match="different sources from 0 to 1"):
        row_shards((TensorSpec("a", (2,), "float32", holders=holders),), 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "at least one tensor"),
        ((SPECS[0], SPECS[0]), "unique"),
        ((TensorSpec("a", (1,), "complex64"),), "complex64"),
    ],
)
def test_bad_tensor_lists_are_rejected(tensors, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tensors, 1 << 20)


@pytest.mark.parametrize(
    "shards",
    [
        [[WeightShard(0, 0, 333), WeightShard(1, 0, 16)]],
        [
            [
                WeightShard(0, 0, 333),
                WeightShard(1, 0, 16),
                WeightShard(2, 0, 1),
                WeightShard(0, 5, 6),
            ]
        ],
        [
            [WeightShard(0, 0, 300), WeightShard(1, 0, 16), WeightShard(2, 0, 1)],
            [WeightShard(0, 301, 333)],
        ],
    ],
    ids=["a tensor is missing", "a row twice", "a row missing"],
)
def test_shards_must_cover_every_row_once(shards):
    with pytest.raises(ValueError, match="exactly once"):
        make_plan(SPECS, 1 << 20, shards)


def test_plan_hash_differs_with_order_shape_dtype_shards_and_buckets():
    plans = {
        make_plan(tensors, size, shards).plan_hash
        for tensors, size, shards in (
            (SPECS, 1 << 16, None),
            (SPECS, 1 << 16, row_shards(SPECS, 2)),
            (SPECS[::-1], 1 << 16, None),
            (SPECS, 1 << 17, None),
            ((TensorSpec("embed", (16, 333), "float32"), *SPECS[1:]), 1 << 16, None),
        )
    }
    assert len(plans) == 5
