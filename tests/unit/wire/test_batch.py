"""Tests of KVBatchMeta: selection, order, concatenation and encoding."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgumentError
from services.wire.batch import MISSING, BlobRef, FieldColumn, KVBatchMeta


def meta_of(*keys: str, field: str = "tokens", blob_ids: tuple[int, ...] = (1,)) -> KVBatchMeta:
    column = FieldColumn(
        name=field,
        dtype="int32",
        row_rank=1,
        tail_shape=(),
        lengths=tuple(range(len(keys))),
        blob_indexes=tuple(n % len(blob_ids) for n in range(len(keys))),
        offsets=tuple(4 * n for n in range(len(keys))),
    )
    return KVBatchMeta(
        partition_id="run/train",
        keys=keys,
        fields=(column,),
        blobs=tuple(
            BlobRef(shard_id="s", blob_id=number, size_bytes=100, checksum=(1 << 64) - number)
            for number in blob_ids
        ),
        tags={
            "group_id": tuple(key[0] for key in keys),
            "v_min": tuple(-n for n in range(len(keys))),
            "reward": tuple(0.5 * n for n in range(len(keys))),
        },
        lease_id="lease",
        revision=3,
    )


def places(meta: KVBatchMeta) -> dict[str, tuple[int, int, int]]:
    column = meta.column("tokens")
    blobs = [meta.blobs[index].blob_id for index in column.blob_indexes]
    rows = zip(meta.keys, blobs, column.offsets, column.lengths, strict=True)
    return {key: (blob, offset, length) for key, blob, offset, length in rows}


def test_the_wire_form_is_loss_free() -> None:
    meta = meta_of("a", "b", "c", blob_ids=(1, 2))
    assert KVBatchMeta.from_bytes(meta.to_bytes()) == meta


def test_the_wire_form_grows_by_a_few_bytes_per_key() -> None:
    def size(count: int) -> int:
        return len(meta_of(*[f"{n:08}" for n in range(count)]).to_bytes())

    assert (size(2000) - size(1000)) / 1000 < 40


@pytest.mark.parametrize("data", [b"\xff", b"junk" * 10])
def test_junk_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="KVBatchMeta"):
        KVBatchMeta.from_bytes(data)


def test_columns_that_do_not_fit_are_rejected() -> None:
    proto = meta_of("a", "b").to_proto()
    proto.fields[0].blob_indexes[0] = 5
    with pytest.raises(InvalidArgumentError, match="outside"):
        KVBatchMeta.from_proto(proto)
    proto = meta_of("a", "b").to_proto()
    del proto.keys[0]
    with pytest.raises(InvalidArgumentError, match="entries"):
        KVBatchMeta.from_proto(proto)


def test_selection_by_key_and_by_index_agree_and_drop_unused_blobs() -> None:
    meta = meta_of("a", "b", "c", "d", blob_ids=(1, 2))
    by_key = meta.select(["d", "b"])
    assert by_key == meta.select([3, 1])
    assert [blob.blob_id for blob in by_key.blobs] == [2]
    assert by_key.tag("group_id") == ("d", "b")
    with pytest.raises(ValueError, match="not in this batch"):
        meta.select(["x"])
    with pytest.raises(ValueError, match="indexes must lie"):
        meta.select([4])


@given(count=st.integers(1, 12), seed=st.integers(0, 100))
def test_parts_put_together_again_are_the_whole(count: int, seed: int) -> None:
    keys = [f"{n:02}" for n in range(count)]
    meta = meta_of(*keys, blob_ids=(1, 2, 3))
    order = list(range(count))
    random.Random(seed).shuffle(order)
    shuffled = meta.select(order)
    assert places(shuffled) == places(meta)
    cut = count // 2
    parts = [shuffled.select(range(cut)), shuffled.select(range(cut, count))]
    again = KVBatchMeta.concat([part for part in parts if part.num_keys]).select(keys)
    assert places(again) == places(meta)
    assert (again.keys, again.tags, again.lease_id) == (meta.keys, meta.tags, meta.lease_id)


def test_a_field_that_one_part_lacks_is_missing_there() -> None:
    both = KVBatchMeta.concat([meta_of("a"), meta_of("b", field="extra", blob_ids=(2,))])
    assert both.column("tokens").blob_indexes == (0, MISSING)
    assert both.column("extra").blob_indexes == (MISSING, 1)


def test_batches_of_several_partitions_cannot_be_concatenated() -> None:
    other = KVBatchMeta(partition_id="run/other", keys=("a",))
    with pytest.raises(ValueError, match="run/other"):
        KVBatchMeta.concat([meta_of("a"), other])
    with pytest.raises(ValueError, match="at least one"):
        KVBatchMeta.concat([])
