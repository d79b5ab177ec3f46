"""Ledger of prompt groups: every issued prompt is in exactly one state. Pure.

::

    issued -> PENDING -> LEASED -> GENERATING -> READY -> TRAINING -> CONSUMED
                 ^                     |           |
                 +------ failed -------+           +--> DROPPED (reason)
                 +--> PARTIAL (interrupted, lost; the next attempt resumes the stored tokens)
                 +--> QUARANTINED after too many attempts

A group is one issued prompt. Its attempt number fences off late results: only results of the newest attempt
count. The ledger collects its changes, so that one transaction can write a batch of transitions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, Self

from services.controller.rules.difficulty import Difficulty, PromptRate
from services.controller.rules.prompts import ReturnedRows, ReturnedRowsChange


class GroupState(StrEnum):
    """State of a group; the diagram is in ``ledger.py``."""

    PENDING = "pending"
    LEASED = "leased"
    GENERATING = "generating"
    PARTIAL = "partial"
    READY = "ready"
    TRAINING = "training"
    CONSUMED = "consumed"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


RUNNING = frozenset({GroupState.LEASED, GroupState.GENERATING})
WAITING = frozenset({GroupState.PENDING, GroupState.PARTIAL})
TERMINAL = frozenset({GroupState.CONSUMED, GroupState.DROPPED, GroupState.QUARANTINED})

GROUP_PREFIX = "g"


@dataclass(slots=True, kw_only=True)
class Group:
    """One issued prompt and its samples."""

    sequence: int
    """Order of admission, from 0."""
    row: int
    """Row of the prompt in the training data."""
    state: GroupState = GroupState.PENDING
    attempt: int = 1
    """Number of the current attempt, from 1."""
    failures: int = 0
    """Failed attempts that count against the prompt, unlike those that the system caused."""
    losses: int = 0
    """Attempts that ended because the worker died."""
    worker_id: str = ""
    """Rollout that generates the group or, if the group is parked, that holds its cached tokens;
    empty without one."""
    oldest_version: int = -1
    """Oldest weight version that sampled, or may sample, one of its tokens; -1 if there is none."""
    started: float = 0.0
    """Time of dispatch, in monotonic seconds."""
    reason: str = ""
    """Why the group was dropped or quarantined."""
    num_unfinished: int = 0
    """Unfinished members when the group was interrupted."""
    num_tokens: int = 0
    """Generated tokens when the group was interrupted."""
    first_attempt: int = 1
    """First attempt whose cached tokens the current attempt may resume. All of them have ``oldest_version``
    or a newer one, which bounds staleness; tokens of earlier attempts are discarded."""
    group_id: str = field(init=False)
    """Identifier of the group in all services."""

    def __post_init__(self) -> None:
        self.group_id = f"{GROUP_PREFIX}{self.sequence:08d}"

    def facts(self) -> "GroupFacts":
        """Returns the stored fields of the group with their current values."""
        return GroupFacts._make(_FACTS(self))


class GroupFacts(NamedTuple):
    """Stored fields of a group."""

    sequence: int
    row: int
    state: str
    attempt: int
    failures: int
    losses: int
    worker_id: str
    oldest_version: int
    num_unfinished: int
    num_tokens: int
    first_attempt: int


_FACTS = attrgetter(*GroupFacts._fields[:2], "state.value", *GroupFacts._fields[3:])


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Complete state from which a ledger is restored."""

    groups: tuple[Group, ...] = ()
    """Groups in flight."""
    num_issued: int = 0
    position: int = 0
    """Rows taken from the prompt order."""
    ended: Mapping[GroupState, int] = field(default_factory=dict)
    """Number of ended groups by state."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped and quarantined groups by reason."""
    returned: ReturnedRows = field(default_factory=ReturnedRows)
    """Rows that are issued once more at the end of their epoch."""
    refilled_before: int = 0
    """Groups that dynamic sampling had replaced when the newest batch was formed."""
    first_step: int = 0
    """Step of the checkpoint that the run starts from; groups of steps up to it are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """Changes since the previous one; its size does not depend on the length of the run."""

    groups: tuple[GroupFacts, ...]
    """Groups in flight that are new or changed."""
    ended: tuple[Group, ...]
    """Groups that ended."""
    num_issued: int
    position: int
    counts: Mapping[GroupState, int]
    """Number of ended groups by state."""
    reasons: Mapping[str, int]
    """Number of dropped and quarantined groups by reason."""
    refilled_before: int
    """Groups that dynamic sampling had replaced when the newest batch was formed."""
    returned: ReturnedRowsChange
    """Rows that are issued once more at the end of their epoch."""
    rates: tuple[PromptRate, ...] = ()
    """Prompts whose success rate changed."""


# Lost workers after which a prompt is assumed to have killed them.
_MAX_LOSSES = 8


class LedgerError(RuntimeError):
    """Raised for a transition that the ledger does not allow, which is a bug."""


class Ledger:
    """States of all issued groups of a run.

    Ended groups are only counted, so memory grows with the groups in flight, not with the run.

    Args:
        max_attempts: Failures of a group after which its prompt is quarantined.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._groups: dict[int, Group] = {}
        # Index of the same groups by state; running groups are in order of their leases.
        self._by_state: dict[GroupState, dict[int, Group]] = {state: {} for state in GroupState}
        self._ended: Counter[GroupState] = Counter()
        self._reasons: Counter[str] = Counter()
        self._changed: set[int] = set()
        self._newly_ended: list[Group] = []
        self.num_issued = 0
        self.position = 0
        self.first_step = 0
        self.refilled_before = 0
        self.returned = ReturnedRows()
        self.difficulty: Difficulty | None = None

    @classmethod
    def restore(cls, state: LedgerState, *, max_attempts: int, now: float) -> Self:
        """Returns a ledger with a restored state; stall times count from ``now``."""
        ledger = cls(max_attempts)
        for group in state.groups:
            ledger._groups[group.sequence] = restored = replace(group, started=now)
            ledger._by_state[restored.state][restored.sequence] = restored
        ledger._ended.update(state.ended)
        ledger._reasons.update(state.reasons)
        ledger.num_issued = state.num_issued
        ledger.position = state.position
        ledger.first_step = state.first_step
        ledger.refilled_before = state.refilled_before
        ledger.returned = state.returned
        return ledger

    def take_changes(self) -> LedgerChange:
        """Returns the changes since the last call."""
        changes = [self._groups[sequence] for sequence in self._changed if sequence in self._groups]
        change = LedgerChange(
            groups=tuple([group.facts() for group in changes]),
            ended=tuple(self._newly_ended),
            num_issued=self.num_issued,
            position=self.position,
            counts=dict(self._ended),
            reasons=dict(self._reasons),
            refilled_before=self.refilled_before,
            returned=self.returned.take_changes(),
            rates=() if self.difficulty is None else self.difficulty.take_changes(),
        )
        self._changed.clear()
        self._newly_ended.clear()
        return change

    def issue(self, row: int, *, position: int) -> Group:
        """Admits the prompt of a row.

        Args:
            position: Rows taken from the prompt order, this one included.
        """
        group = Group(sequence=self.num_issued, row=row)
        self._groups[group.sequence] = self._by_state[group.state][group.sequence] = group
        self._changed.add(group.sequence)
        self.num_issued += 1
        self.position = position
        return group

    def get(self, group_id: str, attempt: int | None = None) -> Group | None:
        """Returns a group in flight; None if it ended, or if ``attempt`` is not its newest."""
        if not group_id.startswith(GROUP_PREFIX):
            return None
        group = self._groups.get(int(group_id.removeprefix(GROUP_PREFIX)))
        if group is None or (attempt is not None and attempt != group.attempt):
            return None
        return group

    def in_state(self, *states: GroupState) -> list[Group]:
        """Returns the groups in any of the states, in order of admission."""
        groups = [group for state in states for group in self._by_state[state].values()]
        return sorted(groups, key=lambda group: group.sequence)

    def count(self, *states: GroupState) -> int:
        """Returns the number of groups in any of the states; ended groups are not counted."""
        return sum(len(self._by_state[state]) for state in states)

    def started_groups(self) -> list[Group]:
        """Returns unfinished groups that are running, or parked with tokens."""
        return [
            group
            for group in self.in_state(*RUNNING, GroupState.PARTIAL)
            if group.state in RUNNING or group.oldest_version >= 0
        ]

    def running(self) -> list[Group]:
        return self.in_state(*RUNNING)

    def lease(self, group: Group, worker_id: str, *, version: int, now: float) -> None:
        """Assigns a waiting group to a rollout that serves ``version``."""
        has_tokens = group.state is GroupState.PARTIAL and group.oldest_version >= 0
        self._transition(group, GroupState.LEASED, WAITING)
        group.worker_id = worker_id
        group.oldest_version = min(group.oldest_version, version) if has_tokens else version
        group.started = now

    def confirm(self, group: Group) -> None:
        """Records that the rollout accepted the group."""
        if group.state is GroupState.LEASED:
            self._set_state(group, GroupState.GENERATING)

    def complete(self, group: Group, *, oldest_version: int) -> None:
        """Records that all samples of the group are stored."""
        self._transition(group, GroupState.READY, RUNNING)
        group.oldest_version = oldest_version

    def interrupt(self, group: Group, *, num_unfinished: int = 0, num_tokens: int = 0) -> None:
        """Parks a running group whose tokens the rollout stored; the next attempt resumes them."""
        self._transition(group, GroupState.PARTIAL, RUNNING)
        group.num_unfinished, group.num_tokens = num_unfinished, num_tokens
        group.attempt += 1

    def stall(self, group: Group) -> bool:
        """Counts a stall of an interrupted group; returns False if its prompt is now quarantined."""
        group.failures += 1
        group.worker_id = ""
        self._changed.add(group.sequence)
        if group.failures >= self._max_attempts:
            self.quarantine(group, "stalled")
            return False
        return True

    def retry(self, group: Group, reason: str) -> bool:
        """Restarts a failed group; returns False if its prompt is quarantined instead."""
        group.failures += 1
        if group.failures >= self._max_attempts:
            self.quarantine(group, reason)
            return False
        self.requeue(group)
        return True

    def park_lost(self, group: Group) -> bool:
        """Parks a group whose worker died; returns False if its prompt is quarantined instead.

        The next attempt resumes tokens that the worker stored, with their weight versions.
        """
        group.losses += 1
        if group.losses >= _MAX_LOSSES:
            self.quarantine(group, "worker_lost")
            return False
        self.interrupt(group)
        group.worker_id = ""
        return True

    def requeue(self, group: Group) -> None:
        """Restarts a group from its first token without a penalty for its prompt.

        Cached tokens of earlier attempts are fenced off, so the next lease sets the group's oldest version.
        """
        self._transition(
            group, GroupState.PENDING, {*RUNNING, *WAITING, GroupState.READY, GroupState.TRAINING}
        )
        group.attempt += 1
        group.first_attempt = group.attempt
        group.worker_id = ""
        group.oldest_version = -1
        group.num_unfinished = group.num_tokens = 0

    def train(self, groups: Iterable[Group]) -> None:
        """Moves ready groups into the batch that is being trained."""
        for group in groups:
            self._transition(group, GroupState.TRAINING, {GroupState.READY})

    def put_back(self, groups: Iterable[Group]) -> None:
        """Moves the groups of a batch that was not trained back to READY."""
        for group in groups:
            self._transition(group, GroupState.READY, {GroupState.TRAINING})

    def consume(self, groups: Iterable[Group]) -> None:
        """Records that the groups were trained and their step is committed."""
        for group in groups:
            self._transition(group, GroupState.CONSUMED, {GroupState.TRAINING})

    def drop(self, group: Group, reason: str) -> None:
        self._end(group, GroupState.DROPPED, reason)

    def quarantine(self, group: Group, reason: str) -> None:
        """Ends a group whose prompt will never be issued again."""
        self._end(group, GroupState.QUARANTINED, reason)

    @property
    def num_admitted(self) -> int:
        """Number of admitted groups that were not dropped or quarantined: in flight and consumed."""
        return len(self._groups) + self._ended[GroupState.CONSUMED]

    def counts(self) -> dict[str, int]:
        """Returns the number of groups in each state; the states add up to ``issued``."""
        counts = Counter(self._ended)
        counts.update(group.state for group in self._groups.values())
        result = {state.value: counts[state] for state in GroupState}
        if sum(result.values()) != self.num_issued:
            raise LedgerError(
                f"{self.num_issued} groups were issued, but the counts by state are {result}"
            )
        return {"issued": self.num_issued, **result}

    def reasons(self) -> dict[str, int]:
        """Returns the number of dropped and quarantined groups by reason."""
        return dict(self._reasons)

    def num_ended(self, reason: str) -> int:
        """Returns the number of groups that were dropped or quarantined for a reason."""
        return self._reasons[reason]

    def _end(self, group: Group, state: GroupState, reason: str) -> None:
        self._transition(group, state, {*RUNNING, *WAITING, GroupState.READY})
        group.reason = reason
        self._reasons[reason] += 1

    def _transition(self, group: Group, state: GroupState, allowed: Iterable[GroupState]) -> None:
        if group.state not in allowed:
            raise LedgerError(f"{group.group_id} cannot change from {group.state} to {state}")
        self._set_state(group, state)
        self._changed.add(group.sequence)
        if state in TERMINAL:
            del self._groups[group.sequence], self._by_state[state][group.sequence]
            self._ended[state] += 1
            self._newly_ended.append(group)

    def _set_state(self, group: Group, state: GroupState) -> None:
        del self._by_state[group.state][group.sequence]
        group.state = state
        self._by_state[state][group.sequence] = group
