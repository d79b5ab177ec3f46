"""Records of the database as Python values."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Self

from services.common.runspec.run import RunSpec
from services.controller.rules.run_state import TERMINAL, Condition, RunState

RELEASE = version("slipstream")
"""Release of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources that a run takes from its project's quota while it is active."""

    gpus: int = 0
    transferqueue_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Stored run."""

    run_id: str
    project: str
    name: str
    spec_json: str
    """Specification as JSON; empty in lists."""
    spec_digest: str
    release: str
    """Release that wrote the specification; empty if unknown."""
    target_steps: int
    """Number of steps to train; 0 while unknown."""
    state: RunState
    state_reason: str
    message: str
    priority: int
    """Runs with a higher priority start first."""
    labels: Mapping[str, str]
    created_by: str
    step: int
    """Number of finished trainer steps."""
    weight_version: int
    """Newest published version; -1 before the first."""
    summary: Mapping[str, Any]
    """Progress in numbers: prompts by state, staleness, held-out scores, sync latency."""
    create_time: float
    update_time: float
    start_time: float | None
    """Time at which it first left the queue; None before."""
    finish_time: float | None
    """Time at which it ended; None before."""
    needs: Needs
    """Resources that it takes from its project's quota while it is active."""
    revision: int
    """Number that grows with each change of state, specification, labels or priority."""
    generation: int
    """Number that grows with each change of the specification."""
    conditions: tuple[Condition, ...]

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """Run to be stored."""

    run_id: str
    name: str
    spec_json: str
    spec_digest: str
    release: str = RELEASE
    project: str = "default"
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    created_by: str = ""
    needs: Needs = Needs()
    step: int = 0
    """Step from which it continues."""
    weight_version: int = -1
    """Version of that step's weights; -1 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Identity of a request, so that its repetition returns the same run."""

    scope: str
    """Caller and operation."""
    key: str
    """Key chosen by the client."""
    body_digest: str
    """SHA-256 of the request's body."""

    @classmethod
    def of(cls, scope: str, key: str, body: str) -> Self | None:
        """Returns the identity of a request; None if the client sent no key."""
        if not key:
            return None
        return cls(scope=scope, key=key, body_digest=hashlib.sha256(body.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Filter and order of a list of runs."""

    project: str | None = None
    state: RunState | None = None
    name: str | None = None
    label: tuple[str, str] | None = None
    is_oldest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Filter and order of a list of a run's events."""

    types: tuple[str, ...] = ()
    """Types to include; empty means all."""
    not_types: tuple[str, ...] = ()
    before_seq: int | None = None
    is_newest_first: bool = False


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Stored event of a run."""

    run_id: str
    seq: int
    """Number of the event, from 1, without gaps."""
    time: float
    type: str
    message: str
    data: Mapping[str, Any]
    actor: str = ""
    """User who caused it; empty for the controller."""


@dataclass(frozen=True, slots=True)
class Note:
    """Event to be stored, with the progress that it reports."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    weight_version: int | None = None
    summary: Mapping[str, Any] | None = None
    actor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Run that a user submits."""

    spec: RunSpec
    project: str = "default"
    priority: int = 0
    labels: Mapping[str, str] | None = None
    actor: str = ""
    """User who submits it."""
    request: RequestKey | None = None
