"""Who got which samples: queues of ready samples, leases, acknowledgements, redelivery."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.transferqueue.facts import AcquireRequest
from services.transferqueue.index.parts import Extension, Row
from services.transferqueue.index.samplers import Candidate, fifo, whole_groups

Sampler = Callable[[Iterable[Candidate]], list[int] | None]


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples in use until a deadline."""

    lease_id: str
    rows: tuple[Row, ...]
    deadline: float


class Consumer:
    """One kind of use of a partition's samples; it gets each sample once.

    Each ready row is in exactly one place: in the queue, under a lease, acknowledged, or passed over
    as stale. A lease that expires returns its rows to the head of the queue.

    Args:
        fields: Fields that a row needs.
        rows: The rows that exist, oldest first.
        acked: Those of them that were acknowledged before.
    """

    def __init__(
        self, fields: frozenset[str], rows: Iterable[Row], acked: frozenset[Row] = frozenset()
    ) -> None:
        self.fields = fields
        self.acked = set(acked)
        self.leases: dict[str, Lease] = {}
        self._stale: list[str] = []
        self._ended: deque[str] = deque(maxlen=1024)
        self._queue = deque(row for row in rows if row not in acked and fields <= row.field_names())

    @property
    def num_leased(self) -> int:
        """Rows in use."""
        return sum(len(lease.rows) for lease in self.leases.values())

    def offer(self, extensions: Iterable[Extension]) -> None:
        """Queue the rows that a put made ready."""
        for extension in extensions:
            if not self.fields <= extension.before and self.fields <= extension.after:
                self._queue += extension.rows

    def forget(self, rows: Iterable[Row]) -> None:
        """Drop rows that were deleted."""
        self.acked.difference_update(rows)

    def next_expiry(self) -> float | None:
        """When the first lease ends."""
        return min((lease.deadline for lease in self.leases.values()), default=None)

    def expire(self, now: float) -> None:
        """Return the rows of leases whose deadline has passed."""
        for lease in [lease for lease in self.leases.values() if lease.deadline <= now]:
            self._give_back(lease)

    def take(
        self, sampler: Sampler, *, num_rows: int, oldest_version: int
    ) -> tuple[tuple[Row, ...], tuple[str, ...]]:
        """Take ``num_rows`` rows out of the queue.

        Returns:
            The rows, none if the sampler is not satisfied, and with them the keys that were passed
            over since the last time because they are too old.
        """
        if len(self._queue) < num_rows:
            return (), ()
        scanned: list[Row] = []
        chosen = sampler(self._scan(scanned, oldest_version)) or []
        taken = set(chosen)
        self._queue.extendleft(
            scanned[index] for index in range(len(scanned) - 1, -1, -1) if index not in taken
        )
        if not chosen:
            return (), ()
        stale, self._stale = tuple(self._stale), []
        return tuple([scanned[index] for index in chosen]), stale

    def lease(self, lease: Lease) -> None:
        """Record who uses rows that were taken."""
        self.leases[lease.lease_id] = lease

    def ack(self, lease_id: str, now: float) -> list[Row] | None:
        """Count the rows of a lease as used.

        Returns:
            The rows that were not acknowledged before; None if this consumer has no such lease.
        """
        if lease_id in self._ended:
            return []
        self.expire(now)
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return None
        rows = [row for row in lease.rows if row.revision != Row.DELETED]
        self.acked.update(rows)
        self._ended.append(lease_id)
        return rows

    def nack(self, lease_id: str) -> bool:
        """Return the rows of a lease; says whether the lease is one of this consumer."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            self._give_back(lease)
        return lease is not None

    def _scan(self, scanned: list[Row], oldest_version: int) -> Iterator[Candidate]:
        while self._queue:
            row = self._queue.popleft()
            if row.revision == Row.DELETED:
                continue
            version = row.tag("v_min")
            v_min = version if isinstance(version, int) else oldest_version
            if v_min < oldest_version:
                self._stale.append(row.key)
                continue
            scanned.append(row)
            yield Candidate(len(scanned) - 1, str(row.tag("group_id") or ""), v_min)

    def _give_back(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self._queue.extendleft(reversed(lease.rows))


def lease_not_found(lease_id: str) -> FailedPreconditionError:
    """The error for a lease that is unknown or expired."""
    return FailedPreconditionError(
        f"lease {lease_id} is not held: it expired and its samples were handed out again; "
        "ask for a longer lease_s if the work takes longer",
        lease_id=lease_id,
    )


def sampler_of(request: AcquireRequest) -> Sampler:
    """The sampler that a request asks for.

    Raises:
        InvalidArgumentError: If its numbers do not fit together.
    """
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
