"""Chooses rollouts for groups: the least loaded one, or the one that holds a group's prefix."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

# Number of newest finished groups in the estimate of :class:`SlotUsage`.
_REMEMBERED = 256


class Placement:
    """Load of each rollout, in groups.

    All members of a group go to one rollout, where they share their prompt's prefix, if its slots
    suffice. A parked group returns to its rollout while that has room: another rollout would have to
    compute its tokens again. New groups go to the least loaded rollout.
    """

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        # Index by load, so that the least loaded rollout is found without a search.
        self._by_load: dict[int, dict[str, None]] = {}
        self._excluded: dict[str, set[str]] = {}
        """Reasons for which rollouts receive no groups."""

    def add(self, worker_id: str) -> None:
        """Adds a rollout without groups."""
        self._move(worker_id, 0)

    def remove(self, worker_id: str) -> None:
        self.exclude(worker_id)
        del self._load[worker_id]
        del self._excluded[worker_id]

    def assigned(self, worker_id: str) -> None:
        """Records that a rollout received a group."""
        if worker_id in self._load:
            self._move(worker_id, self._load[worker_id] + 1)

    def finished(self, worker_id: str) -> None:
        """Records that a group of a rollout ended."""
        if worker_id in self._load:
            self._move(worker_id, self._load[worker_id] - 1)

    @property
    def num_present(self) -> int:
        """Number of rollouts that may receive groups."""
        return len(self._load) - len(self._excluded)

    def exclude(self, worker_id: str, reason: str = "") -> None:
        """Stops assigning groups to a rollout for a reason; its current groups continue."""
        self._excluded.setdefault(worker_id, set()).add(reason)
        self._move(worker_id, self._load[worker_id])

    def include(self, worker_id: str, reason: str = "") -> None:
        """Resumes assigning groups to a rollout, unless it is excluded for another reason."""
        reasons = self._excluded.get(worker_id, set())
        reasons.discard(reason)
        if not reasons:
            self._excluded.pop(worker_id, None)
        self._move(worker_id, self._load[worker_id])

    def choose(self, holder: str, *, room: int) -> str | None:
        """Returns the rollout for a group; None if no rollout may receive groups.

        Args:
            holder: Rollout that had the group before; empty without one.
            room: Groups for which one rollout has slots.
        """
        if not self._by_load:
            return None
        least = min(self._by_load)
        is_there = holder in self._load and holder not in self._excluded
        if is_there and (self._load[holder] < room or self._load[holder] == least):
            return holder
        return next(iter(self._by_load[least]))

    def least_loaded(self, count: int) -> list[str]:
        """Returns the ``count`` least loaded rollouts, or all if there are fewer."""
        names = (name for load in sorted(self._by_load) for name in self._by_load[load])
        return list(islice(names, count))

    def _move(self, worker_id: str, load: int) -> None:
        old_load = self._load.get(worker_id, load)
        equals = self._by_load.get(old_load, {})
        equals.pop(worker_id, None)
        if not equals:
            self._by_load.pop(old_load, None)
        self._load[worker_id] = load
        if worker_id not in self._excluded:
            self._by_load.setdefault(load, {})[worker_id] = None


class SlotUsage:
    """Estimates how many slots a group occupies on average while it is generated."""

    def __init__(self, slots: int, group_size: int) -> None:
        self._slots = slots
        self._group_size = group_size
        self._finished: deque[tuple[int, int]] = deque([(0, 0)] * _REMEMBERED)
        self._total = self._longest = 0
        self.slots_per_group = float(group_size)
        """Mean slots that a group occupies, from 1 to its size; its size until a group has finished."""

    def finished(self, num_tokens: Sequence[int]) -> None:
        """Records a complete group with responses of these lengths, in tokens."""
        dropped_total, dropped_longest = self._finished.popleft()
        self._finished.append((total := sum(num_tokens), longest := max(num_tokens)))
        self._total += total - dropped_total
        self._longest += longest - dropped_longest
        mean = self._total / self._longest if self._longest else float(self._group_size)
        self.slots_per_group = max(1.0, mean)

    def num_groups(self, num_engines: int) -> int:
        """Returns how many groups may be generated at once, at least one per engine."""
        return max(num_engines, round(self._slots * num_engines / self.slots_per_group))


@dataclass(slots=True)
class _Running:
    """A group that one or more rollouts generate."""

    out: dict[str, set[int]]
    """Members without samples, by rollout."""
    num_unfinished: int = 0
    num_tokens: int = 0


class GroupShards:
    """Shards of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, _Running] = {}

    def add(self, group_id: str, members: Mapping[str, Sequence[int]]) -> None:
        """Records a dispatched group, with its members by rollout."""
        self._groups[group_id] = _Running({name: set(numbers) for name, numbers in members.items()})

    def workers(self, group_id: str) -> list[str]:
        """Returns the rollouts that still generate members of a group."""
        group = self._groups.get(group_id)
        return [] if group is None else [*group.out]

    def record_arrived(self, group_id: str, members: Collection[int]) -> list[str]:
        """Records samples that arrived; returns the rollouts whose shard is complete with them."""
        group = self._groups[group_id]
        for numbers in group.out.values():
            numbers.difference_update(members)
        finished_workers = [worker_id for worker_id, numbers in group.out.items() if not numbers]
        for worker_id in finished_workers:
            del group.out[worker_id]
        return finished_workers

    def park(self, group_id: str, worker_id: str, *, num_unfinished: int, num_tokens: int) -> None:
        """Records that a rollout parked its shard."""
        group = self._groups[group_id]
        del group.out[worker_id]
        group.num_unfinished += num_unfinished
        group.num_tokens += num_tokens

    def progress(self, group_id: str) -> tuple[int, int]:
        """Returns unfinished members and tokens of the parked shards of a group."""
        group = self._groups[group_id]
        return group.num_unfinished, group.num_tokens

    def remove(self, group_id: str) -> list[str]:
        """Removes a group; returns the rollouts that still generated members of it."""
        workers = self.workers(group_id)
        self._groups.pop(group_id, None)
        return workers


def split(members: Sequence[int], workers: Sequence[str]) -> dict[str, Sequence[int]]:
    """Splits members into contiguous shards of near-equal sizes, by rollout."""
    size, rest = divmod(len(members), len(workers))
    ends = [(index + 1) * size + min(index + 1, rest) for index in range(len(workers))]
    begins = [0, *ends[:-1]]
    return {
        worker: members[begin:end] for worker, begin, end in zip(workers, begins, ends, strict=True)
    }
