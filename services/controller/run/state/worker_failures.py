"""What it means when the loop of a run breaks: something was lost, or the run cannot go on."""

from collections.abc import Sequence

from services.common.errors import (
    AbortedError,
    DataLossError,
    DeadlineExceededError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from services.controller.store.database import DatabaseError, LeaseLostError

_TRANSIENT = (UnavailableError, DeadlineExceededError, NotFoundError, DataLossError, AbortedError)
_OURS = (LeaseLostError, DatabaseError)


class WorkerLostError(RuntimeError):
    """A worker of a run is gone."""


class UnansweringError(UnavailableError):
    """A worker's process gives no sign of life.

    Args:
        worker_id: The worker.
        why: What was tried.
    """

    def __init__(self, worker_id: str, why: str) -> None:
        super().__init__(f"{worker_id} {why}", worker_id=worker_id)
        self.worker_id = worker_id


class LateError(UnansweringError):
    """A worker's process lives, but does not do what it was asked to: another one takes its place."""


def is_worker_failure(errors: Sequence[BaseException]) -> bool:
    """Whether all that happened is that something else is gone, for which the run can wait."""
    return all(
        isinstance(error, (*_TRANSIENT, WorkerLostError)) and not isinstance(error, _OURS)
        for error in errors
    )


def ends_the_process(errors: Sequence[BaseException]) -> BaseException | None:
    """The error after which this controller must not write any more, if there is one."""
    return next((error for error in errors if isinstance(error, _OURS)), None)


def explain(errors: Sequence[BaseException]) -> tuple[str, str]:
    """Stable code and message of a failed run."""
    if lost := next((e for e in errors if isinstance(e, WorkerLostError)), None):
        return "WorkerLost", str(lost)
    error = errors[0]
    reason = error.reason if isinstance(error, ServiceError) else type(error).__name__
    return reason, "; ".join(dict.fromkeys(str(error) for error in errors))
