"""Where a group goes: to the least loaded rollout, or to the one that holds its prefix."""

from itertools import islice


class Placement:
    """Loads of the rollouts of a run.

    All members of a group go to one rollout, where they share their prompt's prefix, if they find places
    there; see :mod:`~services.controller.rules.shares`. A group that was put aside goes back to where it was
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
