"""Index of a group's samples, built from messages that describe samples of many groups."""

import time

from services.controller.rules.ledger import Group
from services.controller.run.dispatch.sample_index import (
    GroupSamples,
    SampleIndex,
    length_facts,
    spread_of,
)
from services.transferqueue.index.index import Index
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta


class Messages:
    """Fake transferqueue that reports the given batches."""

    def __init__(self, *batches):
        self._batches = batches
        self.released = []

    async def watch(self, partition, revision):
        for batch in self._batches:
            yield batch

    async def release(self, partition, keys, attempts=()):
        self.released += keys


def samples(*keys):
    groups = tuple(key.partition(".")[0] for key in keys)
    members = tuple(int(key.partition(".")[2]) for key in keys)
    tags = {"group_id": groups, "member": members, "attempt": (1,) * len(keys)}
    return KVBatchMeta(partition_id="run_1/train", keys=keys, tags=tags)


def group(number):
    return Group(sequence=number, row=number)


def test_the_spread_of_a_batch_is_by_its_oldest_version_and_its_length():
    # The last sample failed.
    tags = {"v_min": (4, 5, -1), "response_tokens": (7, 100, 0)}
    batch = KVBatchMeta(partition_id="run_1/train", keys=("a.0", "a.1", "a.2"), tags=tags)
    spread = spread_of(batch, weight_version=5, max_staleness=1)
    assert spread == {"staleness": {"0": 1, "1": 1}, "response_tokens": {"0": 1, "8": 1, "128": 1}}


def test_a_sample_counts_as_old_as_what_trains_of_it():
    tags = {"v_min": (2,), "response_tokens": (7,)}
    batch = KVBatchMeta(partition_id="run_1/train", keys=("a.0",), tags=tags)
    spread = spread_of(batch, weight_version=5, max_staleness=1)
    assert spread["staleness"] == {"1": 1}, "its older tokens are masked"


def test_the_95th_percentile_of_lengths_is_one_of_them_and_leaves_out_failed_ones():
    lengths = (*range(1, 101), 0, 0)
    finishes = ("stop",) * 100 + ("failed",) * 2
    tags = {"response_tokens": lengths, "finish_reason": finishes}
    keys = tuple(f"a.{member}" for member in range(102))
    batch = KVBatchMeta(partition_id="run_1/train", keys=keys, tags=tags)
    assert length_facts(batch) == {"response_length_p95": 95, "response_length_max": 100}
    assert length_facts(batch.select([3])) == {"response_length_p95": 4, "response_length_max": 4}
    assert length_facts(batch.select([100])) == {}


async def test_samples_of_several_messages_come_in_the_order_of_the_groups():
    a, b, c = (group(number).group_id for number in range(3))
    queue = Messages(samples(f"{a}.0", f"{c}.0", f"{c}.1"), samples(f"{b}.0", f"{a}.1", f"{b}.1"))
    sample_index = SampleIndex(queue, "run_1/train", group_size=2, required_fields=())
    arrived = []
    async for groups in sample_index.watch_arrivals():
        for group_id, group_samples in groups:
            group_state = group(int(group_id[1:]))
            whole = sample_index.add(group_state, group_samples)
            if whole is not None:
                arrived.append(group_id)
                sample_index.add_group(group_state, whole)
    assert arrived == [c, b, a]
    meta = sample_index.meta([group(0), group(1), group(2)])
    assert meta.keys == (f"{a}.0", f"{a}.1", f"{b}.0", f"{b}.1", f"{c}.0", f"{c}.1")
    await sample_index.release([group(1)])
    assert queue.released == [f"{b}.0", f"{b}.1"]
    assert group(1) not in sample_index
    assert sample_index.meta([]).num_keys == 0


async def test_samples_that_come_again_count_once_and_can_be_discarded():
    a = group(0).group_id
    queue = Messages()
    sample_index = SampleIndex(queue, "run_1/train", group_size=3, required_fields=())
    for keys in ((f"{a}.0",), (f"{a}.0", f"{a}.2")):
        assert sample_index.add(group(0), GroupSamples(samples(*keys), range(len(keys)))) is None
    assert sample_index.members(group(0)) == {0, 2}
    await sample_index.discard([group(0), group(1)])
    assert queue.released == [f"{a}.0", f"{a}.2"]
    assert sample_index.members(group(0)) == set()


async def test_samples_of_groups_that_alternate_in_a_message_keep_apart():
    a, b = (group(number).group_id for number in range(2))
    queue = Messages(samples(f"{a}.0", f"{b}.0", f"{b}.1", f"{a}.1"))
    sample_index = SampleIndex(queue, "run_1/train", group_size=2, required_fields=())
    (groups,) = [groups async for groups in sample_index.watch_arrivals()]
    for number, (group_id, group_samples) in enumerate(groups):
        assert group_samples.keys == (f"{group_id}.0", f"{group_id}.1")
        assert group_samples.numbers("member") == (0, 1)
        sample_index.add_group(group(number), group_samples)
    assert sample_index.meta([group(0), group(1)]).keys == (f"{a}.0", f"{a}.1", f"{b}.0", f"{b}.1")


class Stored:
    """Fake transferqueue that stores samples in a real index."""

    def __init__(self):
        self.index, self.num_puts = Index(lambda blobs: None, time), 0
        self.index.create_partition("run_1/train", required_fields=(), quota_bytes=0)

    async def put(self, group_id, attempt):
        self.num_puts += 1
        column = FieldColumn(
            name="reward",
            dtype="uint8",
            row_rank=0,
            tail_shape=(),
            lengths=(1, 1),
            blob_indexes=(0, 0),
            offsets=(0, 1),
        )
        blob = BlobRef(shard_id="s", blob_id=self.num_puts, size_bytes=2, checksum=0)
        tags = {"group_id": (group_id,) * 2, "member": (0, 1), "attempt": (attempt,) * 2}
        await self.index.commit(
            KVBatchMeta(
                partition_id="run_1/train",
                keys=(f"{group_id}.0", f"{group_id}.1"),
                fields=(column,),
                blobs=(blob,),
                tags=tags,
            ),
            put_id=str(self.num_puts),
        )

    async def get_batch(self, partition):
        return self.index.get(partition, ())

    async def watch(self, partition, revision):
        async for batch in self.index.watch(partition, revision):
            yield batch

    async def release(self, partition, keys, attempts=()):
        self.index.release(partition, keys, attempts)


async def test_a_late_result_is_deleted_but_not_the_one_that_has_replaced_it():
    queue = Stored()
    sample_index = SampleIndex(queue, "run_1/train", group_size=2, required_fields=())
    await queue.put("g1", 1)
    await queue.put("g2", 1)
    ((_, late), (_, other)) = await anext(sample_index.watch_arrivals())
    # Attempt 1 was reclaimed before its samples were seen, and attempt 2 has stored its own.
    await sample_index.delete_incomplete([("g1", 1)])
    await queue.put("g1", 2)
    await sample_index.delete([late, other])
    samples = await sample_index.find()
    assert [*samples] == ["g1"]
    assert [*samples["g1"].numbers("attempt")] == [2, 2]
    await sample_index.delete_incomplete([("g1", 1)])
    assert [*await sample_index.find()] == ["g1"]
    await sample_index.delete_incomplete([("g1", 2)])
    assert not await sample_index.find()
