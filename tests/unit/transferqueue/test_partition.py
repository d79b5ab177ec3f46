"""Samples of a partition: rules of puts, the log for watchers, and metadata."""

import gc
import tracemalloc
from dataclasses import replace
from itertools import accumulate

import pytest

from services.common.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from services.transferqueue.index.partition import Partition
from services.wire.batch import MISSING, BlobRef, FieldColumn, KVBatchMeta

ALL = 1 << 30


def meta_of(
    *keys: str, field: str = "tokens", dtype: str = "int32", blob_id: int = 1, **tags: object
) -> KVBatchMeta:
    count = len(keys)
    column = FieldColumn(
        name=field,
        dtype=dtype,
        row_rank=1,
        tail_shape=(),
        lengths=(2,) * count,
        blob_indexes=(0,) * count,
        offsets=tuple(8 * n for n in range(count)),
    )
    blob = BlobRef(shard_id="s", blob_id=blob_id, size_bytes=8 * count, checksum=0)
    return KVBatchMeta(
        partition_id="run/train",
        keys=keys,
        fields=(column,),
        blobs=(blob,),
        tags={name: tuple(values) for name, values in tags.items()},  # type: ignore[arg-type]
    )


def partition() -> Partition:
    return Partition("run/train", ["tokens"])


def test_a_description_has_all_locations() -> None:
    target = partition()
    target.add(meta_of("a", "b", group_id=["g", "h"]))
    target.add(meta_of("b", field="extra", blob_id=2))
    meta = target.describe(target.get(["b", "a"]))
    assert meta.keys == ("b", "a")
    assert meta.tag("group_id") == ("h", "g")
    assert meta.column("tokens").offsets == (8, 0)
    assert meta.column("extra").blob_indexes == (1, MISSING)
    assert [blob.blob_id for blob in meta.blobs] == [1, 2]


def test_the_log_shows_new_and_changed_samples_once_they_are_complete() -> None:
    target = partition()
    target.add(meta_of("a", field="extra"))
    assert target.changes_since(0, limit=ALL) == (None, 0)
    target.add(meta_of("b", blob_id=2))
    target.add(meta_of("a", blob_id=3))
    meta, revision = target.changes_since(0, limit=ALL)
    assert meta is not None
    assert (meta.keys, revision) == (("b", "a"), 2)
    target.add(meta_of("b", field="extra", blob_id=4))
    meta, revision = target.changes_since(revision, limit=ALL)
    assert meta is not None
    assert (meta.keys, revision) == (("b",), 3)
    assert target.changes_since(revision, limit=ALL) == (None, 3)


def test_the_log_can_be_read_in_parts_and_shows_a_changed_sample_once() -> None:
    target = partition()
    target.add(meta_of("a", "b", "c"))
    target.add(meta_of("a", field="extra", blob_id=2))
    first, revision = target.changes_since(0, limit=2)
    second, _ = target.changes_since(revision, limit=2)
    assert first is not None
    assert second is not None
    assert first.keys + second.keys == ("b", "c", "a")


def test_the_log_stays_small_when_samples_come_and_go() -> None:
    target = partition()
    for number in range(5000):
        (added,) = target.add(meta_of(f"k{number}", blob_id=number))
        target.remove(added.rows)
    assert len(target._log_rows) < 2000
    target.add(meta_of("last", blob_id=9000))
    meta, revision = target.changes_since(0, limit=ALL)
    assert meta is not None
    assert (meta.keys, revision) == (("last",), 5001)


def test_blobs_go_with_the_last_sample_that_needs_them() -> None:
    target = partition()
    target.add(meta_of("a", "b"))
    assert target.remove(target.get(["a"])) == []
    assert [blob.blob_id for blob in target.remove(target.get(["b"]))] == [1]
    assert target.stored_bytes == 0


def test_missing_keys_are_named() -> None:
    target = partition()
    target.add(meta_of("a"))
    with pytest.raises(NotFoundError, match="2 of 3 keys") as caught:
        target.get(["a", "x", "y"])
    assert caught.value.metadata["keys"] == "x,y"


def test_a_refused_put_changes_nothing() -> None:
    target = partition()
    target.add(meta_of("a", group_id=["g"]))
    wrong = [
        (meta_of("a", blob_id=2, group_id=["g"]), AlreadyExistsError, "tokens"),
        (meta_of("b", dtype="int64", group_id=["g"]), InvalidArgumentError, "int64"),
        (meta_of("b", field="x", dtype="complex64", group_id=["g"]), InvalidArgumentError, "dtype"),
        (meta_of("b", "b", group_id=["g", "g"]), InvalidArgumentError, "duplicate keys"),
        (meta_of("b"), InvalidArgumentError, "same tags"),
        (meta_of("b", group_id=[1]), InvalidArgumentError, "group_id"),
        (meta_of("b", group_id=["g"], more=[1]), InvalidArgumentError, "same tags"),
    ]
    for meta, error, message in wrong:
        with pytest.raises(error, match=message):
            target.add(meta)
    assert list(target.rows) == ["a"]
    assert (target.stored_bytes, target.revision) == (8, 1)


def test_a_field_that_leaves_its_blob_is_rejected() -> None:
    meta = meta_of("a")
    small = BlobRef(shard_id="s", blob_id=1, size_bytes=7, checksum=0)
    outside = KVBatchMeta(partition_id="run/train", keys=("a",), fields=meta.fields, blobs=(small,))
    with pytest.raises(InvalidArgumentError, match="ends at byte 8 of a blob of 7"):
        partition().add(outside)


def test_a_sample_of_a_group_of_eight_takes_less_than_500_bytes() -> None:
    target = partition()
    tracemalloc.start()
    try:
        for group in range(500):
            keys = [f"group-{group:08}.{member}" for member in range(8)]
            tags = {"member": range(8), "v_min": [300] * 8, "v_max": [300] * 8, "reward": [0.5] * 8}
            target.add(meta_of(*keys, blob_id=group << 24, **tags))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / 4000 < 500


FIELDS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "rewards")
SAME_TAGS = ("attempt", "v_min", "v_max", "v_first", "num_segments", "prompt_tokens", "greedy")


def whole_sample_meta(number: int, num_members: int) -> KVBatchMeta:
    """Returns the metadata of a put with the fields and tags that rollouts send."""
    lengths = [500 + (7 * number + 31 * member) % 3000 for member in range(num_members)]
    offsets = tuple(accumulate([4 * length for length in lengths[:-1]], initial=0))
    meta = meta_of(*[f"g{number}.{member}" for member in range(num_members)])
    columns = [
        replace(
            meta.fields[0],
            name=name,
            lengths=tuple(lengths),
            offsets=offsets,
            blob_indexes=(index,) * num_members,
        )
        for index, name in enumerate(FIELDS)
    ]
    blobs = [
        BlobRef(shard_id="s", blob_id=(number << 24) + n, size_bytes=1 << 20, checksum=1 << 62)
        for n in range(len(FIELDS))
    ]
    tags = dict.fromkeys(SAME_TAGS, (number // 100,) * num_members)
    texts = dict.fromkeys(("finish_reason", "data_source"), ("stop",) * num_members)
    return replace(
        meta,
        fields=tuple(columns),
        blobs=tuple(blobs),
        tags={"group_id": (f"g{number}",) * num_members}
        | {"member": tuple(range(num_members)), "response_tokens": tuple(lengths)}
        | tags
        | texts,
    )


@pytest.mark.parametrize(("num_members", "limit"), [(8, 450), (1, 500)])
def test_a_sample_with_all_its_fields_and_tags_takes_little_memory(
    num_members: int, limit: int
) -> None:
    target = partition()
    for number in range(400 // num_members):
        # Earlier samples fill the structures that all puts share.
        target.add(whole_sample_meta(1 << 20 | number, num_members))
    tracemalloc.start()
    try:
        for number in range(1000 // num_members):
            meta = whole_sample_meta(number, num_members)
            target.add(KVBatchMeta.from_bytes(meta.to_bytes()))
        del meta
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / 1000 < limit


def test_puts_that_share_columns_lose_their_blobs_apart() -> None:
    target = partition()
    for number, key in enumerate("abc"):
        target.add(meta_of(key, blob_id=number))
    a, b, c = target.get(["a", "b", "c"])
    assert a.parts == b.parts == c.parts
    assert [blob.blob_id for blob in target.remove([b])] == [1]
    (extension,) = target.add(meta_of("a", "c", field="extra", blob_id=3))
    assert ([row.key for row in extension.rows], extension.before) == (["a", "c"], {"tokens"})
    assert target.stored_bytes == 8 + 8 + 16
    assert [blob.blob_id for blob in target.remove([c])] == [2]
    column = target.describe([a]).column("tokens")
    assert (column.blob_indexes, column.lengths) == ((0,), (2,))
    assert [meta.field_names for meta in target.describe_puts()] == [("tokens", "extra")]
    assert target.stored_bytes == 8 + 16


def test_columns_grow_as_wide_as_their_values() -> None:
    target = partition()
    values = [1, -128, 127, 128, -(1 << 15) - 1, 1 << 31, -(1 << 63), (1 << 63) - 1]
    for number, value in enumerate(values):
        target.add(meta_of(str(number), blob_id=number, version=[value]))
    assert list(target.describe(list(target.rows.values())).tag("version")) == values


def test_equal_tags_of_different_types_stay_apart() -> None:
    target = partition()
    target.add(meta_of("a", "b", version=[1, 2], reward=[1.0, 2.0], score=[1.0, 2.0]))
    meta = target.describe(target.get(["a", "b"]))
    assert [type(meta.tag(name)[0]) for name in ("version", "reward", "score")] == [
        int,
        float,
        float,
    ]


def test_numbers_above_32_bits_are_kept() -> None:
    target = partition()
    target.add(meta_of("a", version=[1 << 40]))
    assert target.describe(target.get(["a"])).tag("version") == (1 << 40,)
