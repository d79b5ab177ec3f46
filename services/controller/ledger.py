"""Every prompt that was issued is in exactly one state. Pure.

    issued -> PENDING -> LEASED -> GENERATING -> READY -> TRAINING -> CONSUMED
                 ^                     |           |
                 +--- failed, lost ----+           +--> DROPPED (reason)
                 +--> QUARANTINED after too many tries

A group is one issued prompt. Its attempt number fences late results: only the newest attempt counts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class GroupState(StrEnum):
    """Where a group is."""

    PENDING = "pending"
    LEASED = "leased"
    GENERATING = "generating"
    PARTIAL = "partial"
    READY = "ready"
    TRAINING = "training"
    CONSUMED = "consumed"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


_RUNNING = frozenset({GroupState.LEASED, GroupState.GENERATING})
_TERMINAL = frozenset({GroupState.CONSUMED, GroupState.DROPPED, GroupState.QUARANTINED})


class LedgerError(RuntimeError):
    """A transition that the ledger does not allow: a fault of ours."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One issued prompt and its samples."""

    group_id: str
    sequence: int
    """Order of admission, from 0."""
    row: int
    """Row of the prompt in the training data."""
    state: GroupState = GroupState.PENDING
    attempt: int = 1
    """Try, from 1."""
    worker_id: str = ""
    """Who generates it."""
    oldest_version: int = -1
    """Oldest weight version that its samples have, or may get."""
    started: float = 0.0
    """When it was handed out, in monotonic seconds."""
    reason: str = ""
    """Why it was dropped or quarantined."""


class Ledger:
    """States of all issued groups of a run.

    Terminal groups are only counted, so memory stays with the groups in flight.

    Args:
        max_attempts: Tries of a group before its prompt is quarantined.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._groups: dict[str, Group] = {}
        self._ended: Counter[GroupState] = Counter()
        self._reasons: Counter[str] = Counter()
        self.num_issued = 0

    def issue(self, row: int) -> Group:
        """Admit the prompt of a row."""
        group = Group(group_id=f"g{self.num_issued:08d}", sequence=self.num_issued, row=row)
        self._groups[group.group_id] = group
        self.num_issued += 1
        return group

    def get(self, group_id: str, attempt: int | None = None) -> Group | None:
        """A group in flight; None if it ended, or if ``attempt`` is not its newest."""
        group = self._groups.get(group_id)
        if group is None or (attempt is not None and attempt != group.attempt):
            return None
        return group

    def in_state(self, *states: GroupState) -> list[Group]:
        """Groups in any of the states, in order of admission."""
        found = [group for group in self._groups.values() if group.state in states]
        return sorted(found, key=lambda group: group.sequence)

    def running(self) -> list[Group]:
        """Groups that are with a rollout."""
        return self.in_state(*_RUNNING)

    def lease(self, group: Group, worker_id: str, *, version: int, now: float) -> None:
        """Hand a pending group to a rollout that serves ``version``."""
        self._move(group, GroupState.LEASED, {GroupState.PENDING})
        group.worker_id = worker_id
        group.oldest_version = version
        group.started = now

    def confirm(self, group: Group) -> None:
        """The rollout has taken the group."""
        if group.state is GroupState.LEASED:
            group.state = GroupState.GENERATING

    def complete(self, group: Group, *, oldest_version: int) -> None:
        """The samples of the group are stored."""
        self._move(group, GroupState.READY, _RUNNING)
        group.oldest_version = oldest_version

    def retry(self, group: Group, reason: str) -> bool:
        """Generate the group again; False if its prompt is quarantined instead."""
        if group.attempt >= self._max_attempts:
            self.quarantine(group, reason)
            return False
        self._move(group, GroupState.PENDING, {*_RUNNING, GroupState.READY})
        group.attempt += 1
        group.worker_id = ""
        return True

    def train(self, groups: Iterable[Group]) -> None:
        """The groups form the batch that is being trained."""
        for group in groups:
            self._move(group, GroupState.TRAINING, {GroupState.READY})

    def consume(self, groups: Iterable[Group]) -> None:
        """The groups were trained and their step is committed."""
        for group in groups:
            self._move(group, GroupState.CONSUMED, {GroupState.TRAINING})

    def drop(self, group: Group, reason: str) -> None:
        """Give up a group; the reason is counted."""
        group.reason = reason
        self._reasons[reason] += 1
        self._move(group, GroupState.DROPPED, {*_RUNNING, GroupState.PENDING, GroupState.READY})

    def quarantine(self, group: Group, reason: str) -> None:
        """Never issue the prompt of this group again."""
        group.reason = reason
        self._reasons[reason] += 1
        self._move(group, GroupState.QUARANTINED, {*_RUNNING, GroupState.PENDING, GroupState.READY})

    @property
    def num_admitted(self) -> int:
        """Groups that were admitted and not taken back: in flight and consumed."""
        return len(self._groups) + self._ended[GroupState.CONSUMED]

    def counts(self) -> dict[str, int]:
        """Number of groups in each state; they add up to ``issued``."""
        counts = Counter(self._ended)
        counts.update(group.state for group in self._groups.values())
        result = {state.value: counts[state] for state in GroupState}
        if sum(result.values()) != self.num_issued:
            raise LedgerError(f"{self.num_issued} groups were issued, but the states hold {result}")
        return {"issued": self.num_issued, **result}

    def reasons(self) -> dict[str, int]:
        """Dropped and quarantined groups by reason."""
        return dict(self._reasons)

    def _move(self, group: Group, state: GroupState, allowed: Iterable[GroupState]) -> None:
        if group.state not in allowed:
            raise LedgerError(f"{group.group_id} cannot go from {group.state} to {state}")
        group.state = state
        if state in _TERMINAL:
            del self._groups[group.group_id]
            self._ended[state] += 1
