"""Leases ready samples to consumers and handles their acknowledgements."""

from collections.abc import Iterable, Mapping, Sequence

from services.common.clock import Clock
from services.common.errors import DeadlineExceededError, FailedPreconditionError
from services.common.ids import new_id
from services.transferqueue.concurrency import Waiters
from services.transferqueue.index.columns import Extension, Row
from services.transferqueue.index.consumers import Consumer, Lease, lease_not_found, sampler_of
from services.transferqueue.index.partition import Partition, find
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.types import AcquireRequest

AckedKeys = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Fields and acknowledged keys of each consumer."""


class Leasing:
    """Consumers and leases of all partitions.

    Args:
        partitions: The partitions, by id.
        waiters: Wake a partition's waiting requests when it changes.
        clock: Clock for leases and waits.
    """

    def __init__(
        self,
        partitions: Mapping[str, Partition],
        waiters: Waiters,
        clock: Clock,
    ) -> None:
        self._partitions = partitions
        self._waiters = waiters
        self._clock = clock
        self._consumers: dict[str, dict[str, Consumer]] = {}

    def open(self, partition_id: str) -> None:
        """Adds a new partition."""
        self._consumers[partition_id] = {}

    def close(self, partition_id: str) -> None:
        """Removes a partition."""
        del self._consumers[partition_id]

    def offer(self, partition_id: str, extensions: Iterable[Extension]) -> None:
        """Queues the rows that a put made ready for the consumers."""
        for consumer in self._consumers[partition_id].values():
            consumer.offer(extensions)

    def forget(self, partition_id: str, rows: Sequence[Row]) -> None:
        """Drops deleted rows."""
        for consumer in self._consumers[partition_id].values():
            consumer.forget(rows)

    def acked(self, partition_id: str) -> set[Row]:
        """Returns the rows that at least one consumer acknowledged."""
        return {row for c in self._consumers[partition_id].values() for row in c.acked}

    def num_leased(self, partition_id: str) -> int:
        """Returns the number of leased rows."""
        return sum(consumer.num_leased for consumer in self._consumers[partition_id].values())

    def export(self, partition_id: str) -> AckedKeys:
        """Returns the acknowledged keys of all consumers, for a snapshot."""
        return {
            name: (tuple(sorted(consumer.fields)), tuple(row.key for row in consumer.acked))
            for name, consumer in self._consumers[partition_id].items()
        }

    def restore(self, partition_id: str, acked_keys: AckedKeys) -> None:
        """Restores the acknowledgements of a snapshot; the samples must already be restored."""
        partition = find(self._partitions, partition_id)
        for name, (fields, keys) in acked_keys.items():
            acked = frozenset(partition.get(keys))
            rows = partition.rows.values()
            self._consumers[partition_id][name] = Consumer(frozenset(fields), rows, acked)

    async def acquire(self, request: AcquireRequest) -> KVBatchMeta:
        """Leases samples; waits until there are enough.

        Returns:
            The samples with their lease.

        Raises:
            DeadlineExceededError: If there are not enough in time; nothing is leased.
            FailedPreconditionError: If the consumer asked for other fields before.
            InvalidArgumentError: If the numbers of the request do not match.
        """
        sampler = sampler_of(request)
        deadline = self._clock.monotonic() + request.wait_s
        while True:
            partition = find(self._partitions, request.partition_id)
            consumer = self._consumer(partition, request)
            now = self._clock.monotonic()
            consumer.expire(now)
            rows = consumer.take(sampler, num_rows=request.num_keys)
            if rows:
                return self._lease(partition, consumer, request, rows)
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
        """Marks the samples of a lease as used.

        Raises:
            FailedPreconditionError: If the lease expired or never existed.
        """
        find(self._partitions, partition_id)
        now = self._clock.monotonic()
        consumers = self._consumers[partition_id].values()
        if not any(consumer.ack(lease_id, now) for consumer in consumers):
            raise lease_not_found(lease_id)

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
        return partition.describe(rows, lease_id=lease_id)
