"""Where a group goes: to the least loaded rollout, or to the one that holds its prefix."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice


class Placement:
    """Loads of the rollouts of a run.

    All members of a group go to one rollout, where they share their prompt's prefix, if they find places
    there. A group that was put aside goes back to where it was
    while there is room: elsewhere all that it has would be computed again. New groups even out the loads.
    """

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        # Rollouts by the number of groups that they have, so that nobody searches for the least.
        self._by_load: dict[int, dict[str, None]] = {}
        self._away: set[str] = set()

    def add(self, worker_id: str) -> None:
        """A rollout is there, without groups."""
        self._move(worker_id, 0)

    def remove(self, worker_id: str) -> None:
        """A rollout is gone."""
        self.send_away(worker_id)
        del self._load[worker_id]
        self._away.discard(worker_id)

    def assigned(self, worker_id: str) -> None:
        """A rollout got a group."""
        if worker_id in self._load:
            self._move(worker_id, self._load[worker_id] + 1)

    def finished(self, worker_id: str) -> None:
        """A group of a rollout ended."""
        if worker_id in self._load:
            self._move(worker_id, self._load[worker_id] - 1)

    @property
    def num_present(self) -> int:
        """Rollouts that may get groups."""
        return len(self._load) - len(self._away)

    def send_away(self, worker_id: str) -> None:
        """A rollout gets no groups for now; what it has goes on."""
        self._away.add(worker_id)
        self._move(worker_id, self._load[worker_id])

    def bring_back(self, worker_id: str) -> None:
        """A rollout may get groups again."""
        self._away.discard(worker_id)
        self._move(worker_id, self._load[worker_id])

    def choose(self, holder: str, *, room: int) -> str | None:
        """The rollout for a group; None if there is none.

        Args:
            holder: The rollout that had the group before; empty if none had.
            room: Groups that a rollout has places for.
        """
        if not self._by_load:
            return None
        least = min(self._by_load)
        is_there = holder in self._load and holder not in self._away
        if is_there and (self._load[holder] < room or self._load[holder] == least):
            return holder
        return next(iter(self._by_load[least]))

    def least_loaded(self, count: int) -> list[str]:
        """The ``count`` least loaded rollouts; fewer if there are not so many."""
        names = (name for load in sorted(self._by_load) for name in self._by_load[load])
        return list(islice(names, count))

    def _move(self, worker_id: str, load: int) -> None:
        known = self._load.get(worker_id, load)
        equals = self._by_load.get(known, {})
        equals.pop(worker_id, None)
        if not equals:
            self._by_load.pop(known, None)
        self._load[worker_id] = load
        if worker_id not in self._away:
            self._by_load.setdefault(load, {})[worker_id] = None


# Groups that the estimate is of.
_REMEMBERED = 256


class SlotUsage:
    """Learns from finished groups how many places one takes on average while it is being generated.

    Args:
        places: Samples that one engine decodes at once.
        group_size: Samples of a group.
    """

    def __init__(self, places: int, group_size: int) -> None:
        self._places = places
        self._group_size = group_size
        self._finished: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def finished(self, num_tokens: Sequence[int]) -> None:
        """A group is whole, with responses of these lengths."""
        self._finished.append((sum(num_tokens), max(num_tokens)))

    @property
    def slots_per_group(self) -> float:
        """Places that a group takes on average, from 1 to its size; its size before the first is finished."""
        total = sum(tokens for tokens, _ in self._finished)
        longest = sum(most for _, most in self._finished)
        return max(1.0, total / longest) if longest else float(self._group_size)

    def num_groups(self, num_engines: int) -> int:
        """Groups that may be generated at once; one for each engine at least."""
        return max(num_engines, round(self._places * num_engines / self.slots_per_group))


@dataclass(slots=True)
class _Running:
    """A group that is with one or more rollouts."""

    out: dict[str, set[int]]
    """Members without samples, by rollout."""
    num_unfinished: int = 0
    num_tokens: int = 0


class GroupShards:
    """The shares of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, _Running] = {}

    def begin(self, group_id: str, members: Mapping[str, Sequence[int]]) -> None:
        """A group was handed out: members by rollout."""
        self._groups[group_id] = _Running({name: set(some) for name, some in members.items()})

    def workers(self, group_id: str) -> list[str]:
        """Rollouts that still work on a group."""
        group = self._groups.get(group_id)
        return [] if group is None else [*group.out]

    def brought(self, group_id: str, members: Collection[int]) -> list[str]:
        """Samples of a group arrived; returns the rollouts whose share ended with them."""
        group = self._groups[group_id]
        for some in group.out.values():
            some.difference_update(members)
        ended = [worker_id for worker_id, some in group.out.items() if not some]
        for worker_id in ended:
            del group.out[worker_id]
        return ended

    def put_aside(
        self, group_id: str, worker_id: str, *, num_unfinished: int, num_tokens: int
    ) -> None:
        """A rollout stopped its share and stored what it has."""
        group = self._groups[group_id]
        del group.out[worker_id]
        group.num_unfinished += num_unfinished
        group.num_tokens += num_tokens

    def progress(self, group_id: str) -> tuple[int, int]:
        """Unfinished members, and tokens, of the shares that were put aside."""
        group = self._groups[group_id]
        return group.num_unfinished, group.num_tokens

    def end(self, group_id: str) -> list[str]:
        """Forget a group; returns the rollouts that still worked on it."""
        workers = self.workers(group_id)
        self._groups.pop(group_id, None)
        return workers


def split(members: Sequence[int], workers: Sequence[str]) -> dict[str, Sequence[int]]:
    """Shares of members, neighbours together, of equal sizes as far as that goes."""
    size, rest = divmod(len(members), len(workers))
    ends = [(place + 1) * size + min(place + 1, rest) for place in range(len(workers))]
    begins = [0, *ends[:-1]]
    return {
        worker: members[begin:end] for worker, begin, end in zip(workers, begins, ends, strict=True)
    }
