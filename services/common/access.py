"""Which calls a run's token allows: those that name that run, and nothing else.

The rule is about requests, not about methods, so a method added tomorrow is covered: one whose request
names no run is closed to workers unless it is listed here.
"""

from contextvars import ContextVar
from typing import Any

from prometheus_client import Counter

from services.common.credentials import Identity
from services.common.errors import PermissionDeniedError, UnauthenticatedError
from services.common.fields import run_of
from services.common.run_tokens import SERVICES

AUTH_FAILURES = Counter(
    "slipstream_auth_failures_total",
    "Calls that were refused for who made them.",
    ["reason"],
)
for _reason in ("unauthenticated", "permission_denied"):
    AUTH_FAILURES.labels(_reason)

# Their requests name no run; what they give is restricted to the caller's run elsewhere.
_OPEN_TO_RUNS = frozenset({"/slipstream.transferqueue.v1.TransferQueueService/ConnectClient"})
_HEALTH = "/grpc.health.v1.Health/"

_caller: ContextVar[str] = ContextVar("caller", default=SERVICES)


def caller_run() -> str | None:
    """Run of the worker whose request is being served; None if a service made it."""
    caller = _caller.get()
    return None if caller == SERVICES else caller


def admit(identity: Identity, method: str, request: Any, authorization: str) -> None:
    """See that a caller may make a request, and remember who it is while the request is served.

    Args:
        identity: Of the process that serves.
        method: Full name of the method.
        request: The request.
        authorization: The header of that name; empty if none came.

    Raises:
        UnauthenticatedError: If the caller is not known.
        PermissionDeniedError: If it belongs to another run.
    """
    if not identity.is_known or method.startswith(_HEALTH):
        return
    try:
        bearer = identity.bearer(authorization)
    except UnauthenticatedError:
        AUTH_FAILURES.labels("unauthenticated").inc()
        raise
    if bearer != SERVICES and method not in _OPEN_TO_RUNS and run_named_by(request) != bearer:
        AUTH_FAILURES.labels("permission_denied").inc()
        raise PermissionDeniedError(
            f"a worker of {bearer} may not call {method} for another run or for none", method=method
        )
    _caller.set(bearer)


def run_named_by(request: Any) -> str | None:
    """The run that a request is about; None if it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        run_id: str = request.run_id
        return run_id
    for name in ("partition_id", "scope"):
        if name in fields:
            return run_of(getattr(request, name))
    return None
