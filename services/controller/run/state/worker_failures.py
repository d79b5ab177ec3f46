"""Classifies errors of a run: lost workers, from which it recovers, or failures that end it."""

from collections.abc import Collection, Sequence

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
_CONTROLLER_ERRORS = (LeaseLostError, DatabaseError)


class WorkerLostError(RuntimeError):
    """Raised if a worker of a run is gone.

    Args:
        code: Error code of the run if the loss ends it.
    """

    def __init__(self, message: str, *, code: str = "WorkerLost") -> None:
        super().__init__(message)
        self.code = code


class RolloutsOutdatedError(Exception):
    """Raised if all rollouts must restart with the changed specification."""


class UnresponsiveError(UnavailableError):
    """Raised if a worker's process does not answer."""

    def __init__(self, worker_id: str, why: str) -> None:
        super().__init__(f"{worker_id} {why}", worker_id=worker_id)
        self.worker_id = worker_id


class UnpublishableError(UnavailableError):
    """Raised if no version can be published, because members of the weight group do not answer.

    Args:
        worker_ids: Workers of these members. Whether they are lost shows when the loops are entered again.
    """

    def __init__(self, message: str, worker_ids: Collection[str]) -> None:
        super().__init__(message)
        self.worker_ids = worker_ids


class LateError(UnresponsiveError):
    """Raised if a worker's process is alive but misses a deadline; the worker is replaced."""


def is_worker_failure(errors: Sequence[BaseException]) -> bool:
    """Returns True if all errors come from lost or unavailable peers, so that the run can recover."""
    return all(
        isinstance(error, (*_TRANSIENT, WorkerLostError))
        and not isinstance(error, _CONTROLLER_ERRORS)
        for error in errors
    )


def find_fatal(errors: Sequence[BaseException]) -> BaseException | None:
    """Returns the error after which this controller must not write any more; None without one."""
    return next((error for error in errors if isinstance(error, _CONTROLLER_ERRORS)), None)


def explain(errors: Sequence[BaseException]) -> tuple[str, str]:
    """Returns the stable code and the message with which a run fails."""
    if loss := next((e for e in errors if isinstance(e, WorkerLostError)), None):
        return loss.code, str(loss)
    error = errors[0]
    reason = error.reason if isinstance(error, ServiceError) else type(error).__name__
    return reason, "; ".join(dict.fromkeys(str(error) for error in errors))
