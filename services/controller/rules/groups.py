"""What the ledger knows of an issued prompt, and of all of them: plain values. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from services.controller.rules.difficulty import PromptRate
from services.controller.rules.prompts import ReturnedRows


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
    """Try, from 1."""
    failures: int = 0
    """Tries that failed because of the prompt, not of the machinery around it."""
    losses: int = 0
    """Tries that ended because the worker died."""
    worker_id: str = ""
    """Who generates it; of one that was put aside, who holds what was computed of it, if anybody does."""
    oldest_version: int = -1
    """Oldest weight version that its samples have, or may get; -1 while it has none."""
    started: float = 0.0
    """When it was handed out, in monotonic seconds."""
    reason: str = ""
    """Why it was dropped or quarantined."""
    num_unfinished: int = 0
    """Members that were not finished when it was interrupted."""
    num_tokens: int = 0
    """Tokens that it had when it was interrupted."""
    first_attempt: int = 1
    """First attempt whose cached tokens the newest attempt may resume. Every one of them is of
    ``oldest_version`` or newer, which bounds staleness; tokens of earlier attempts are discarded."""
    group_id: str = field(init=False)
    """Its name on every plane."""

    def __post_init__(self) -> None:
        self.group_id = f"{GROUP_PREFIX}{self.sequence:08d}"

    def facts(self) -> "GroupFacts":
        """What is stored of it, as it is now."""
        return GroupFacts._make(_FACTS(self))


class GroupFacts(NamedTuple):
    """What is stored of a group."""

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
    """Everything that a ledger needs to go on."""

    groups: tuple[Group, ...] = ()
    """Groups in flight."""
    num_issued: int = 0
    position: int = 0
    """Rows of the prompt order that were taken."""
    ended: Mapping[GroupState, int] = field(default_factory=dict)
    """Number of ended groups by state."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Dropped and quarantined groups by reason."""
    returned: ReturnedRows = field(default_factory=ReturnedRows)
    """Rows that are issued once more at the end of their epoch."""
    first_step: int = 0
    """Step of the checkpoint that the run starts from: no group of it or of earlier steps is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """What changed since the change before: as much as was touched, however long the run is."""

    groups: tuple[GroupFacts, ...]
    """Groups in flight that are new or changed."""
    ended: tuple[Group, ...]
    """Groups that ended."""
    num_issued: int
    position: int
    counts: Mapping[GroupState, int]
    """Number of ended groups by state."""
    reasons: Mapping[str, int]
    """Dropped and quarantined groups by reason."""
    returned: ReturnedRows
    """Rows that are issued once more at the end of their epoch."""
    rates: tuple[PromptRate, ...] = ()
    """Prompts whose running success changed."""
