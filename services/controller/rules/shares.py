"""Which members of a running group each rollout has. Pure.

A group with more members than a rollout has places is shared. Its shares end one by one, with samples or put
aside; when all have ended, the group is whole, or goes on with the members that are missing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Running:
    """A group that is with one or more rollouts."""

    out: dict[str, set[int]]
    """Members without samples, by rollout."""
    num_unfinished: int = 0
    num_tokens: int = 0


class Shares:
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
