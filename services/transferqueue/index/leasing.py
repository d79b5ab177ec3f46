"""Leases ready samples to the consumers of a partition: samplers, queues, acknowledgements, redelivery."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from services.common.fields import new_id
from services.common.host import Clock
from services.common.task_group import Waiters
from services.transferqueue.index.columns import Extension, Row
from services.transferqueue.index.partition import Partition, find
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.types import AcquireRequest


def fifo(groups: Iterable[str], count: int) -> list[int] | None:
    """Returns the positions of the ``count`` oldest samples in ``groups``; None if there are fewer.

    Args:
        groups: Group id of each ready sample, oldest first.
    """
    num_ready = sum(1 for _ in islice(groups, count))
    return list(range(count)) if num_ready == count else None


def whole_groups(groups: Iterable[str], count: int, *, group_size: int) -> list[int] | None:
    """Returns the positions of ``count`` samples whose groups were complete first; None if there are fewer.

    Members are found by group id, never by adjacency, so a late member cannot mix two prompts.

    Raises:
        ValueError: If ``count`` is not a multiple of ``group_size``.
    """
    if group_size < 1 or count % group_size:
        raise ValueError(f"count must be a multiple of group_size ({group_size}), got {count}")
    members: dict[str, list[int]] = {}
    indexes: list[int] = []
    for index, group_id in enumerate(groups):
        group = members.setdefault(group_id, [])
        group.append(index)
        if len(group) == group_size:
            indexes += group
            if len(indexes) == count:
                return indexes
    return None


Sampler = Callable[[Iterable[str]], list[int] | None]


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples that a consumer uses until a deadline."""

    lease_id: str
    rows: tuple[Row, ...]
    deadline: float


class Consumer:
    """One use of a partition's samples; receives each sample once.

    Each ready row is in exactly one state: queued, leased, or acknowledged. A lease that expires
    returns its rows to the head of the queue.

    Args:
        fields: Fields that a row needs to be ready.
        rows: The existing rows, oldest first.
        acked: Rows that were acknowledged before.
    """

    def __init__(
        self, fields: frozenset[str], rows: Iterable[Row], acked: frozenset[Row] = frozenset()
    ) -> None:
        self.fields = fields
        self.acked = set(acked)
        self.leases: dict[str, Lease] = {}
        self._ended: deque[str] = deque(maxlen=1024)
        self._queue = deque(row for row in rows if row not in acked and fields <= row.field_names())

    @property
    def num_leased(self) -> int:
        return sum(len(lease.rows) for lease in self.leases.values())

    def offer(self, extensions: Iterable[Extension]) -> None:
        """Queues the rows that a put made ready."""
        for extension in extensions:
            if not self.fields <= extension.before and self.fields <= extension.after:
                self._queue += extension.rows

    def remove_rows(self, rows: Iterable[Row]) -> None:
        """Removes deleted rows from the acknowledged rows."""
        self.acked.difference_update(rows)

    def next_expiry(self) -> float | None:
        """Returns the earliest deadline of a lease; None without leases."""
        return min((lease.deadline for lease in self.leases.values()), default=None)

    def expire(self, now: float) -> None:
        """Returns the rows of expired leases to the queue."""
        for lease in [lease for lease in self.leases.values() if lease.deadline <= now]:
            self._requeue(lease)

    def dequeue(self, sampler: Sampler, *, num_rows: int) -> tuple[Row, ...]:
        """Removes ``num_rows`` rows from the queue; returns none if the sampler cannot choose enough."""
        if len(self._queue) < num_rows:
            return ()
        scanned: list[Row] = []
        indexes = sampler(self._scan(scanned)) or []
        dequeued = set(indexes)
        self._queue.extendleft(
            scanned[index] for index in range(len(scanned) - 1, -1, -1) if index not in dequeued
        )
        return tuple([scanned[index] for index in indexes])

    def lease(self, lease: Lease) -> None:
        """Records a lease of rows that :meth:`dequeue` returned."""
        self.leases[lease.lease_id] = lease

    def ack(self, lease_id: str, now: float) -> bool:
        """Marks the rows of a lease as used; returns True if this consumer has or had the lease."""
        if lease_id in self._ended:
            return True
        self.expire(now)
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self.acked.update(row for row in lease.rows if row.revision != Row.DELETED)
        self._ended.append(lease_id)
        return True

    def _scan(self, scanned: list[Row]) -> Iterator[str]:
        while self._queue:
            row = self._queue.popleft()
            if row.revision == Row.DELETED:
                continue
            scanned.append(row)
            yield str(row.tag("group_id") or "")

    def _requeue(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self._queue.extendleft(reversed(lease.rows))


def lease_not_found(lease_id: str) -> FailedPreconditionError:
    """Returns the error for a lease that is unknown or expired."""
    return FailedPreconditionError(
        f"lease {lease_id} expired and its samples may be leased again; "
        "use a longer lease_s if the work takes longer",
        lease_id=lease_id,
    )


def sampler_of(request: AcquireRequest) -> Sampler:
    """Returns the sampler for a request.

    Raises:
        InvalidArgumentError: If ``num_keys`` is below 1 or not a multiple of ``group_size``.
    """
    if request.num_keys < 1:
        raise InvalidArgumentError(f"num_keys must be at least 1, got {request.num_keys}")
    if request.group_size == 0:
        return partial(fifo, count=request.num_keys)
    if request.num_keys % request.group_size:
        raise InvalidArgumentError(
            f"num_keys must be a multiple of group_size ({request.group_size}), got {request.num_keys}"
        )
    return partial(whole_groups, count=request.num_keys, group_size=request.group_size)


AckedKeys = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Fields and acknowledged keys of each consumer."""


class Leasing:
    """Consumers and leases of all partitions.

    Args:
        waiters: Wake a partition's waiting requests when it changes.
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
        self._consumers[partition_id] = {}

    def close(self, partition_id: str) -> None:
        del self._consumers[partition_id]

    def offer(self, partition_id: str, extensions: Iterable[Extension]) -> None:
        """Queues the rows that a put made ready for the consumers."""
        for consumer in self._consumers[partition_id].values():
            consumer.offer(extensions)

    def remove_rows(self, partition_id: str, rows: Sequence[Row]) -> None:
        """Drops deleted rows."""
        for consumer in self._consumers[partition_id].values():
            consumer.remove_rows(rows)

    def num_leased(self, partition_id: str) -> int:
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
            rows = consumer.dequeue(sampler, num_rows=request.num_keys)
            if rows:
                return self._lease(partition, consumer, request, rows)
            if now >= deadline:
                raise DeadlineExceededError(
                    f"partition {request.partition_id} had fewer than {request.num_keys} ready samples for "
                    f"{request.consumer!r} within {request.wait_s} s; no lease was made",
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
                f"consumer {request.consumer!r} must request the same fields each time, "
                f"{sorted(consumer.fields)}, got {sorted(fields)}; use another consumer name",
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
