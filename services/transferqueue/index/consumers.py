"""Consumers of a partition: queues of ready samples, leases, acknowledgements, redelivery."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.transferqueue.index.columns import Extension, Row
from services.transferqueue.index.samplers import fifo, whole_groups
from services.wire.transferqueue.types import AcquireRequest

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
        """Number of leased rows."""
        return sum(len(lease.rows) for lease in self.leases.values())

    def offer(self, extensions: Iterable[Extension]) -> None:
        """Queues the rows that a put made ready."""
        for extension in extensions:
            if not self.fields <= extension.before and self.fields <= extension.after:
                self._queue += extension.rows

    def forget(self, rows: Iterable[Row]) -> None:
        """Drops deleted rows from the acknowledged ones."""
        self.acked.difference_update(rows)

    def next_expiry(self) -> float | None:
        """Returns the earliest deadline of a lease; None without leases."""
        return min((lease.deadline for lease in self.leases.values()), default=None)

    def expire(self, now: float) -> None:
        """Returns the rows of expired leases to the queue."""
        for lease in [lease for lease in self.leases.values() if lease.deadline <= now]:
            self._give_back(lease)

    def take(self, sampler: Sampler, *, num_rows: int) -> tuple[Row, ...]:
        """Removes ``num_rows`` rows from the queue; returns none if the sampler cannot choose enough."""
        if len(self._queue) < num_rows:
            return ()
        scanned: list[Row] = []
        chosen = sampler(self._scan(scanned)) or []
        taken = set(chosen)
        self._queue.extendleft(
            scanned[index] for index in range(len(scanned) - 1, -1, -1) if index not in taken
        )
        return tuple([scanned[index] for index in chosen])

    def lease(self, lease: Lease) -> None:
        """Records a lease of rows that ``take`` returned."""
        self.leases[lease.lease_id] = lease

    def ack(self, lease_id: str, now: float) -> bool:
        """Marks the rows of a lease as used; returns whether this consumer has or had the lease."""
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

    def _give_back(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self._queue.extendleft(reversed(lease.rows))


def lease_not_found(lease_id: str) -> FailedPreconditionError:
    """Returns the error for a lease that is unknown or expired."""
    return FailedPreconditionError(
        f"lease {lease_id} is not held: it expired and its samples were handed out again; "
        "ask for a longer lease_s if the work takes longer",
        lease_id=lease_id,
    )


def sampler_of(request: AcquireRequest) -> Sampler:
    """Returns the sampler for a request.

    Raises:
        InvalidArgumentError: If ``num_keys`` is below 1 or not a multiple of ``group_size``.
    """
    if request.num_keys < 1:
        raise InvalidArgumentError(f"{request.num_keys} samples were asked for; ask for at least 1")
    if request.group_size == 0:
        return partial(fifo, count=request.num_keys)
    if request.num_keys % request.group_size:
        raise InvalidArgumentError(
            f"{request.num_keys} samples are not whole groups of {request.group_size}"
        )
    return partial(whole_groups, count=request.num_keys, group_size=request.group_size)
