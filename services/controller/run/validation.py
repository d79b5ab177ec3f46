"""Validation state machine: one evaluation of one pinned weight version at a time. Pure.

    IDLE -> [WAIT_WEIGHTS] -> ACQUIRE -> RUNNING -> SCORING -> REPORTING -> IDLE
    any -> CANCELLING -> STOPPED

The evaluated version is pinned from the trigger to the report. The lease on the replicas is held while
samples are generated only, and every way out releases it. A trigger during an evaluation waits; the newest
one wins, except that a final one is never replaced.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Reason = Literal["initial", "periodic", "final", "manual"]
Status = Literal["ok", "timeout", "failed", "missed"]


class ValidationState(StrEnum):
    """Where the machine is."""

    DISABLED = "DISABLED"
    IDLE = "IDLE"
    WAIT_WEIGHTS = "WAIT_WEIGHTS"
    ACQUIRE = "ACQUIRE"
    RUNNING = "RUNNING"
    SCORING = "SCORING"
    REPORTING = "REPORTING"
    CANCELLING = "CANCELLING"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class BegunEvaluation:
    """An evaluation that has begun."""

    version: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """How one evaluation ended."""

    version: int
    reason: Reason
    status: Status
    num_samples: int


def is_periodic(version: int, every: int) -> bool:
    """Whether a version is evaluated because of its number: a resumed run picks the same ones."""
    return every > 0 and version > 0 and version % every == 0


class ValidationMachine:
    """Takes events, holds pin and lease, collects results.

    Args:
        num_samples: Samples of one evaluation.
        retries: Times that scoring may fail before the evaluation does.
        enabled: Whether anything is evaluated at all.
    """

    def __init__(self, num_samples: int, *, retries: int = 1, enabled: bool = True) -> None:
        self._num_samples = num_samples
        self._retries = retries
        self._retries_left = retries
        self._published = -1
        self._done = 0
        self._reason: Reason = "periodic"
        self._status: Status = "ok"
        self.state = ValidationState.IDLE if enabled else ValidationState.DISABLED
        self.pinned: int | None = None
        self.has_lease = False
        self.pending: tuple[int, Reason] | None = None
        self.results: list[ValidationResult] = []

    def begun(self) -> BegunEvaluation:
        """What is pinned, and why; for whoever knows that something is."""
        assert self.pinned is not None
        return BegunEvaluation(self.pinned, self._reason)

    def published(self, version: int) -> None:
        """The rollouts serve a new version."""
        self._published = max(self._published, version)
        if self.state is ValidationState.WAIT_WEIGHTS and version == self.pinned:
            self.state = ValidationState.ACQUIRE

    def trigger(self, version: int, reason: Reason) -> None:
        """Ask for an evaluation of a version."""
        if self.state in (
            ValidationState.DISABLED,
            ValidationState.CANCELLING,
            ValidationState.STOPPED,
        ):
            return
        if self.state is not ValidationState.IDLE:
            if self.pending is None or self.pending[1] != "final":
                self.pending = (version, reason)
            return
        if self._published > version:
            self.results.append(ValidationResult(version, reason, "missed", 0))
            return
        self.pinned = version
        self._reason = reason
        self._status = "ok"
        self._done = 0
        self._retries_left = self._retries
        self.state = (
            ValidationState.ACQUIRE if self._published == version else ValidationState.WAIT_WEIGHTS
        )

    def leased(self) -> None:
        """The replicas are ours."""
        if self.state is ValidationState.ACQUIRE:
            self.has_lease = True
            self.state = ValidationState.RUNNING

    def missed(self) -> None:
        """The rollouts serve a newer version already."""
        if self.state is ValidationState.ACQUIRE:
            self._status = "missed"
            self.state = ValidationState.REPORTING

    def sample_done(self, count: int = 1) -> None:
        """Samples were generated and stored."""
        if self.state is not ValidationState.RUNNING:
            return
        self._done += count
        if self._done >= self._num_samples:
            self.has_lease = False
            self.state = ValidationState.SCORING

    def timeout(self) -> None:
        """The deadline passed."""
        if self.state in (ValidationState.WAIT_WEIGHTS, ValidationState.ACQUIRE):
            self._status = "timeout"
            self.state = ValidationState.REPORTING
        elif self.state is ValidationState.RUNNING:
            self._status = "timeout"
            self.has_lease = False
            self.state = ValidationState.SCORING

    def scored(self) -> None:
        """The scores are computed."""
        if self.state is ValidationState.SCORING:
            self.state = ValidationState.REPORTING

    def failed(self) -> None:
        """Scoring failed; it is tried again while retries are left."""
        if self.state is not ValidationState.SCORING:
            return
        if self._retries_left > 0:
            self._retries_left -= 1
            return
        self._status = "failed"
        self.state = ValidationState.REPORTING

    def reported(self) -> None:
        """The result is out; the next evaluation may start."""
        if self.state is not ValidationState.REPORTING or self.pinned is None:
            return
        self.results.append(ValidationResult(self.pinned, self._reason, self._status, self._done))
        self.pinned = None
        self.state = ValidationState.IDLE
        if self.pending is not None:
            (version, reason), self.pending = self.pending, None
            self.trigger(version, reason)

    def stop(self) -> None:
        """End for good."""
        if self.state is ValidationState.STOPPED:
            return
        self.has_lease = False
        self.pending = None
        self.state = ValidationState.CANCELLING

    def released(self) -> None:
        """Everything of the cancelled evaluation is given back."""
        if self.state is ValidationState.CANCELLING:
            self.state = ValidationState.STOPPED
