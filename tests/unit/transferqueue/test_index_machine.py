"""Comparison of the index with a small model over random puts, leases, crashes and restores.

No sample is lost, leased twice at the same time, or acknowledged twice.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.errors import DeadlineExceededError, FailedPreconditionError
from services.transferqueue.index.index import Index
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.types import AcquireRequest
from tests.helpers.puts import put_of

PARTITION = "run/train"
SHARDS = ("s0", "s1")
LEASE_S = 10.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.freed: set[int] = set()
        self.num_keys = 0
        self.num_blobs = 0
        # The model: fields and blobs of each key, and the state of each ready key.
        self.blobs: dict[str, dict[str, tuple[str, int]]] = {}
        self.queued: set[str] = set()
        self.leases: dict[str, set[str]] = {}
        self.dead_leases: set[str] = set()
        self.acked: set[str] = set()
        self.open_index()

    def open_index(self) -> None:
        self.index = Index(
            lambda blobs: self.freed.update(blob.blob_id for blob in blobs), self.clock
        )
        self.index.create_partition(PARTITION, required_fields=["tokens"], quota_bytes=0)

    def commit(self, keys: Sequence[str], field: str, shard_id: str) -> None:
        self.num_blobs += 1
        meta = put_of(PARTITION, keys, field, shard_id=shard_id, blob_id=self.num_blobs)
        self.runner.run(self.index.commit(meta, put_id=f"put-{self.num_blobs}"))
        for key in keys:
            self.blobs.setdefault(key, {})[field] = (shard_id, self.num_blobs)
            if field == "tokens":
                self.queued.add(key)

    def forget(self, keys: set[str]) -> None:
        for key in keys:
            del self.blobs[key]
        for group in (self.queued, self.acked, *self.leases.values()):
            group -= keys

    @rule(
        count=st.integers(1, 4),
        field=st.sampled_from(["tokens", "other"]),
        shard=st.sampled_from(SHARDS),
    )
    def put(self, count: int, field: str, shard: str) -> None:
        keys = [f"k{self.num_keys + n}" for n in range(count)]
        self.num_keys += count
        self.commit(keys, field, shard)

    @rule(field=st.sampled_from(["tokens", "other"]), shard=st.sampled_from(SHARDS))
    def add_field(self, field: str, shard: str) -> None:
        keys = [key for key, fields in self.blobs.items() if field not in fields][:3]
        if keys:
            self.commit(keys, field, shard)

    @rule(count=st.integers(1, 5))
    def acquire(self, count: int) -> None:
        request = AcquireRequest(
            partition_id=PARTITION,
            consumer="c",
            fields=("tokens",),
            num_keys=count,
            lease_s=LEASE_S,
        )
        if count > len(self.queued):
            with pytest.raises(DeadlineExceededError):
                self.runner.run(self.index.leasing.acquire(request))
            return
        meta = self.runner.run(self.index.leasing.acquire(request))
        assert len(set(meta.keys)) == count
        assert set(meta.keys) <= self.queued
        self.queued -= set(meta.keys)
        self.leases[meta.lease_id] = set(meta.keys)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        keys = self.leases.pop(lease_id)
        self.index.leasing.ack(PARTITION, lease_id)
        self.index.leasing.ack(PARTITION, lease_id)
        assert not keys & self.acked
        self.acked |= keys

    @precondition(lambda self: self.dead_leases)
    @rule(data=st.data())
    def ack_too_late(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.dead_leases)))
        with pytest.raises(FailedPreconditionError):
            self.index.leasing.ack(PARTITION, lease_id)

    @rule()
    def expire(self) -> None:
        self.clock.now += LEASE_S
        for lease_id, keys in self.leases.items():
            self.queued |= keys
            self.dead_leases.add(lease_id)
        self.leases.clear()

    @rule(shard=st.sampled_from(SHARDS))
    def crash(self, shard: str) -> None:
        hit = {
            key for key, fields in self.blobs.items() if any(s == shard for s, _ in fields.values())
        }
        before = len(self.index._losses[PARTITION])
        self.index.remove_shard(shard)
        lost_keys = {key for loss in self.index._losses[PARTITION][before:] for key in loss.keys}
        assert lost_keys == hit
        self.forget(hit)

    @precondition(lambda self: self.blobs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.blobs)), max_size=4))
        assert self.index.release(PARTITION, sorted(keys)) == len(keys)
        assert self.index.release(PARTITION, sorted(keys)) == 0
        self.forget(keys)

    @rule()
    def restore(self) -> None:
        (image,) = self.index.export("run")
        self.open_index()
        for meta in image.puts:
            self.recommit(meta)
        self.index.leasing.restore(PARTITION, image.acked)
        for lease_id, keys in self.leases.items():
            self.queued |= keys
            self.dead_leases.add(lease_id)
        self.leases.clear()

    def recommit(self, meta: KVBatchMeta) -> None:
        """Commits a put of a snapshot again with new blobs."""
        blobs = []
        for column in meta.fields:
            self.num_blobs += 1
            blob = meta.blobs[column.blob_indexes[0]]
            blobs.append(replace(blob, blob_id=self.num_blobs))
            for key in meta.keys:
                self.blobs[key][column.name] = (blob.shard_id, self.num_blobs)
        fields = [
            replace(column, blob_indexes=(number,) * len(meta.keys))
            for number, column in enumerate(meta.fields)
        ]
        moved = replace(meta, fields=tuple(fields), blobs=tuple(blobs))
        self.runner.run(self.index.commit(moved, put_id=f"put-{self.num_blobs}"))

    @invariant()
    def every_key_is_there_once(self) -> None:
        (stats,) = self.index.stats()
        ready = {key for key, fields in self.blobs.items() if "tokens" in fields}
        assert stats.num_keys == len(self.blobs)
        assert stats.num_ready == len(ready)
        leased = set().union(*self.leases.values())
        assert self.queued | leased | self.acked == ready
        assert len(self.queued) + len(leased) + len(self.acked) == len(ready)

    @invariant()
    def no_blob_in_use_is_freed(self) -> None:
        used = {blob_id for fields in self.blobs.values() for _, blob_id in fields.values()}
        assert not used & self.freed

    def teardown(self) -> None:
        self.runner.close()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(stateful_step_count=30)
