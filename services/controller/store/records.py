"""What the database holds, as values."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Self

from services.common.runspec.run import RunSpec
from services.controller.rules.conditions import Condition
from services.controller.rules.run_state import TERMINAL, RunState

RELEASE = version("slipstream")
"""Of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run takes of its project's quota while it is active."""

    gpus: int = 0
    transferqueue_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is stored."""

    run_id: str
    project: str
    name: str
    spec_json: str
    """Empty in a list."""
    spec_digest: str
    release: str
    """That wrote the specification; empty if nobody knows."""
    target_steps: int
    """Steps that it is to train; 0 while nobody knows."""
    state: RunState
    state_reason: str
    message: str
    priority: int
    """Runs with a higher one start first."""
    labels: Mapping[str, str]
    created_by: str
    step: int
    """Finished trainer steps."""
    weight_version: int
    """Newest published version; -1 before the first."""
    summary: Mapping[str, Any]
    """Progress in numbers: prompts by state, staleness, held-out scores, sync latency."""
    create_time: float
    update_time: float
    start_time: float | None
    """When it first left the queue; None before that."""
    finish_time: float | None
    """When it ended; None before that."""
    needs: Needs
    """What it takes of its project's quota while it is active."""
    revision: int
    """Grows with each change."""
    generation: int
    """Grows with each change of the specification."""
    conditions: tuple[Condition, ...]

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that is to be stored."""

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
    """Step that it goes on from."""
    weight_version: int = -1
    """Version of that step's weights; -1 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Identifies a request, so that its repetition returns the same run."""

    scope: str
    """Who asked for what."""
    key: str
    """Chosen by the client."""
    body_digest: str
    """SHA-256 of what was asked."""

    @classmethod
    def of(cls, scope: str, key: str, body: str) -> Self | None:
        """The identity of a request; None if the client chose no key."""
        if not key:
            return None
        return cls(scope=scope, key=key, body_digest=hashlib.sha256(body.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs are listed."""

    project: str | None = None
    state: RunState | None = None
    name: str | None = None
    label: tuple[str, str] | None = None
    is_oldest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events of a run are listed."""

    types: tuple[str, ...] = ()
    """These; none for all."""
    not_types: tuple[str, ...] = ()
    before_seq: int | None = None
    is_newest_first: bool = False


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    run_id: str
    seq: int
    """From 1, without gaps."""
    time: float
    type: str
    message: str
    data: Mapping[str, Any]
    actor: str = ""
    """Who caused it; empty for the controller itself."""


@dataclass(frozen=True, slots=True)
class Note:
    """An event that is to be stored, with the progress it tells of."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    weight_version: int | None = None
    summary: Mapping[str, Any] | None = None
    actor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run that a user asks for."""

    spec: RunSpec
    project: str = "default"
    priority: int = 0
    labels: Mapping[str, str] | None = None
    actor: str = ""
    """Who asks."""
    request: RequestKey | None = None
