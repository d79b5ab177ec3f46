"""Records of issued prompt groups and the states that the ledger keeps. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from services.controller.rules.difficulty import PromptRate
from services.controller.rules.prompts import ReturnedRows


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
    """Oldest weight version that its samples have, or may get; -1 without one."""
    started: float = 0.0
    """Time of dispatch, in monotonic seconds."""
    reason: str = ""
    """Why the group was dropped or quarantined."""
    num_unfinished: int = 0
    """Unfinished members when the group was interrupted."""
    num_tokens: int = 0
    """Generated tokens when the group was interrupted."""
    first_attempt: int = 1
    """First attempt whose cached tokens the current attempt may resume. All of them have
    ``oldest_version`` or a newer one, which bounds staleness; tokens of earlier attempts are
    discarded."""
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
    returned: ReturnedRows
    """Rows that are issued once more at the end of their epoch."""
    rates: tuple[PromptRate, ...] = ()
    """Prompts whose success rate changed."""
