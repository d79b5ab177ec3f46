"""The metadata of all partitions: what is visible, who waits for it, how many bytes runs may take.

Everything here runs on one event loop and changes only between awaits, so there are no locks. Bytes
are elsewhere: a put is added here after its bytes are in, and blobs that nobody needs any more are
handed to ``free``.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from services.common.batch import KVBatchMeta
from services.common.clock import Clock
from services.common.columns import BlobRef
from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from services.common.ids import new_id
from services.transferqueue.consumers import Consumer, Lease, Sampler, lease_not_found
from services.transferqueue.facts import AcquireRequest, Loss, PartitionStats
from services.transferqueue.partition import Partition
from services.transferqueue.parts import Row
from services.transferqueue.quotas import Quotas, run_of
from services.transferqueue.samplers import balanced_order, fifo, whole_groups
from services.transferqueue.waiters import Waiters

MAX_PUSH_KEYS = 4096
"""Most samples of one push to a watcher."""


class Index:
    """All partitions of a transferqueue.

    Args:
        free: Takes the blobs that nobody needs any more.
        clock: Times leases.
    """

    def __init__(self, free: Callable[[Sequence[BlobRef]], None], clock: Clock) -> None:
        self._free = free
        self._clock = clock
        self._partitions: dict[str, Partition] = {}
        self._consumers: dict[str, dict[str, Consumer]] = {}
        self._losses: dict[str, list[Loss]] = {}
        self._quotas = Quotas(clock)
        self._waiters = Waiters()

    def create_partition(
        self, partition_id: str, *, required_fields: Sequence[str], quota_bytes: int
    ) -> None:
        """Create a partition; repeating it with the same fields changes nothing.

        Raises:
            FailedPreconditionError: If it exists with other required fields.
        """
        partition = self._partitions.get(partition_id)
        if partition is not None and partition.required_fields != set(required_fields):
            raise FailedPreconditionError(
                f"partition {partition_id} exists and requires {sorted(partition.required_fields)}, "
                f"not {sorted(required_fields)}; drop it first",
                partition_id=partition_id,
            )
        self._quotas.raise_to(run_of(partition_id), quota_bytes)
        if partition is None:
            self._partitions[partition_id] = Partition(partition_id, required_fields)
            self._consumers[partition_id] = {}
            self._losses[partition_id] = []

    def drop_partition(self, partition_id: str) -> int:
        """Delete a partition; returns how many samples it had."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        num_keys = len(partition.rows)
        self._remove(partition, list(partition.rows.values()))
        del self._partitions[partition_id], self._consumers[partition_id]
        del self._losses[partition_id]
        self._waiters.wake(partition_id)
        return num_keys

    async def reserve(self, partition_id: str, size_bytes: int, *, wait_s: float) -> None:
        """Count bytes that are about to come against the run's quota, waiting for room.

        Raises:
            NotFoundError: If there is no such partition.
            ResourceExhaustedError: If the quota had no room in time.
            InvalidArgumentError: If the bytes alone exceed the quota.
        """
        self._partition(partition_id)
        await self._quotas.take(run_of(partition_id), size_bytes, wait_s=wait_s)

    def cancel(self, partition_id: str, size_bytes: int) -> None:
        """Take back what ``reserve`` counted."""
        self._quotas.give_back(run_of(partition_id), size_bytes)

    async def commit(self, meta: KVBatchMeta) -> int:
        """Make a put visible; its bytes are in and reserved.

        Returns:
            The partition's revision.

        Raises:
            ServiceError: If the put breaks a rule; then nothing of it is visible.
        """
        partition = self._partition(meta.partition_id)
        added = partition.add(meta)
        for consumer in self._consumers[meta.partition_id].values():
            consumer.offer(added)
        self._waiters.wake(meta.partition_id)
        return partition.revision

    def get(self, partition_id: str, keys: Sequence[str]) -> KVBatchMeta:
        """Describe samples by key, or all.

        Raises:
            NotFoundError: If the partition or a key does not exist.
        """
        partition = self._partition(partition_id)
        return partition.describe(partition.get(keys or list(partition.rows)))

    def release(self, partition_id: str, keys: Sequence[str]) -> int:
        """Delete samples; returns how many of the keys existed."""
        partition = self._partition(partition_id)
        rows = [partition.rows[key] for key in dict.fromkeys(keys) if key in partition.rows]
        self._remove(partition, rows)
        return len(rows)

    async def watch(self, partition_id: str, revision: int) -> AsyncIterator[KVBatchMeta]:
        """New and changed complete samples after ``revision``, as they come.

        Raises:
            NotFoundError: If the partition does not exist, or when it is dropped.
        """
        while True:
            partition = self._partition(partition_id)
            meta, revision = partition.changes_since(revision, limit=MAX_PUSH_KEYS)
            if meta is not None:
                yield meta
            elif partition.revision <= revision:
                await self._waiters.wait(partition_id, timeout_s=None)

    def lose_shard(self, shard_id: str) -> None:
        """Delete the samples that had a value on a dead shard, and report the unacknowledged ones."""
        for name, partition in self._partitions.items():
            rows = partition.rows_on(shard_id)
            acked = {row for c in self._consumers[name].values() for row in c.acked}
            keys = tuple(row.key for row in rows if row not in acked)
            self._remove(partition, rows)
            if keys:
                self._losses[name].append(Loss(keys=keys, shard_id=shard_id))
                self._waiters.wake(name)

    async def watch_losses(self, partition_id: str) -> AsyncIterator[Loss]:
        """Losses of a partition from its beginning, as they come."""
        num_seen = 0
        while True:
            self._partition(partition_id)
            losses = self._losses[partition_id][num_seen:]
            for loss in losses:
                yield loss
            num_seen += len(losses)
            if not losses:
                await self._waiters.wait(partition_id, timeout_s=None)

    async def acquire(self, request: AcquireRequest) -> tuple[KVBatchMeta, tuple[str, ...]]:
        """Lease samples, waiting until there are enough.

        Returns:
            The samples with their lease, and the keys passed over as too old.

        Raises:
            DeadlineExceededError: If there are not enough in time; nothing is leased.
            FailedPreconditionError: If the consumer asked for other fields before.
            InvalidArgumentError: If the numbers do not fit together.
        """
        sampler = _sampler(request)
        deadline = self._clock.monotonic() + request.wait_s
        while True:
            partition = self._partition(request.partition_id)
            consumer = self._consumer(partition, request)
            now = self._clock.monotonic()
            consumer.expire(now)
            rows, stale = consumer.take(
                sampler,
                num_rows=request.num_keys,
                oldest_version=request.oldest_weight_version,
            )
            if rows:
                return self._lease(partition, consumer, request, rows), stale
            if now >= deadline:
                raise DeadlineExceededError(
                    f"{request.partition_id} did not have {request.num_keys} samples ready for "
                    f"{request.consumer!r} within {request.wait_s} s; nothing was leased",
                    partition_id=request.partition_id,
                    consumer=request.consumer,
                )
            wake_at = min(deadline, consumer.next_expiry() or deadline)
            await self._waiters.wait(request.partition_id, timeout_s=max(wake_at - now, 0.001))

    def ack(self, partition_id: str, lease_id: str) -> None:
        """Count a lease's samples as used.

        Raises:
            FailedPreconditionError: If the lease expired or never was.
        """
        self._partition(partition_id)
        now = self._clock.monotonic()
        if not any(c.ack(lease_id, now) for c in self._consumers[partition_id].values()):
            raise lease_not_found(lease_id)

    def nack(self, partition_id: str, lease_id: str) -> None:
        """Hand a lease's samples out again.

        Raises:
            FailedPreconditionError: If the lease expired or never was.
        """
        self._partition(partition_id)
        if not any(c.nack(lease_id) for c in self._consumers[partition_id].values()):
            raise lease_not_found(lease_id)
        self._waiters.wake(partition_id)

    def stats(self) -> list[PartitionStats]:
        """Fill of each partition."""
        return [
            PartitionStats(
                partition_id=name,
                num_keys=len(partition.rows),
                num_ready=partition.num_complete,
                num_leased=sum(c.num_leased for c in self._consumers[name].values()),
                stored_bytes=partition.stored_bytes,
                quota_bytes=self._quotas.limit(run_of(name)),
                revision=partition.revision,
            )
            for name, partition in self._partitions.items()
        ]

    def _partition(self, partition_id: str) -> Partition:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise NotFoundError(
                f"partition {partition_id!r} does not exist; create it first",
                partition_id=partition_id,
            )
        return partition

    def _remove(self, partition: Partition, rows: Sequence[Row]) -> None:
        unused = partition.remove(rows)
        for consumer in self._consumers[partition.partition_id].values():
            consumer.forget(rows)
        if unused:
            size = sum(blob.size_bytes for blob in unused)
            self._quotas.give_back(run_of(partition.partition_id), size)
            self._free(unused)

    def _consumer(self, partition: Partition, request: AcquireRequest) -> Consumer:
        consumers = self._consumers[partition.partition_id]
        fields = frozenset(request.fields)
        consumer = consumers.get(request.consumer)
        if consumer is None:
            consumer = consumers[request.consumer] = Consumer(fields, partition.rows.values())
        if consumer.fields != fields:
            raise FailedPreconditionError(
                f"consumer {request.consumer!r} asks for {sorted(fields)} after it asked for "
                f"{sorted(consumer.fields)}; use another consumer name for another use",
                consumer=request.consumer,
            )
        return consumer

    def _lease(
        self,
        partition: Partition,
        consumer: Consumer,
        request: AcquireRequest,
        rows: tuple[Row, ...],
    ) -> KVBatchMeta:
        lease_id = new_id("lease")
        consumer.lease(Lease(lease_id, rows, self._clock.monotonic() + request.lease_s))
        meta = partition.describe(rows, lease_id=lease_id)
        if request.num_ranks == 1:
            return meta
        costs = [sum(lengths) for lengths in zip(*(c.lengths for c in meta.fields), strict=True)]
        return meta.reorder(balanced_order(costs, num_ranks=request.num_ranks))


def _sampler(request: AcquireRequest) -> Sampler:
    if request.num_keys < 1 or request.num_ranks < 1 or request.num_keys % request.num_ranks:
        raise InvalidArgumentError(
            f"{request.num_keys} samples for {request.num_ranks} ranks: both must be positive and "
            "divide equally"
        )
    if request.group_size == 0:
        return partial(fifo, count=request.num_keys)
    if request.num_keys % request.group_size:
        raise InvalidArgumentError(
            f"{request.num_keys} samples are not whole groups of {request.group_size}"
        )
    return partial(whole_groups, count=request.num_keys, group_size=request.group_size)
