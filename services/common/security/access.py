"""Authentication and authorization of gRPC calls: a run's token allows only calls that name that run.

The rule depends on the request, not on the method, so it covers new methods: if a request names no
run, the method is closed to workers unless it is listed here.
"""

import logging
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from prometheus_client import Counter

from services.common.errors import PermissionDeniedError, UnauthenticatedError
from services.common.fields import run_of
from services.common.security.credentials import SERVICES, Identity
from services.common.security.tls import ANY_WORKER, peer_name
from services.common.telemetry.logging import RareLog

logger = logging.getLogger(__name__)

AUTH_FAILURES = Counter(
    "slipstream_auth_failures_total",
    "Calls that were rejected because of their caller's identity.",
    ["reason"],
)
for _reason in ("unauthenticated", "permission_denied"):
    AUTH_FAILURES.labels(_reason)

# Methods whose requests name no run; they restrict the result to the caller's run themselves.
_OPEN_TO_RUNS = frozenset({"/slipstream.transferqueue.v1.TransferQueueService/ConnectClient"})
# Methods whose requests name a run, but that only the controller may call: a run must not set its quota.
_CLOSED_TO_RUNS = frozenset(
    f"/slipstream.transferqueue.v1.{name}"
    for name in (
        *("TransferQueueService/CreatePartition", "TransferQueueService/DropPartition"),
        *("TransferQueueService/SaveSnapshot", "TransferQueueService/RestoreSnapshot"),
        *("SampleRecordService/RecordSamples", "SampleRecordService/ReadSampleRecords"),
        *("SampleRecordService/GetSampleUpload", "SampleRecordService/DeleteSampleRecords"),
    )
)
_NAMES_OF_SERVICES = frozenset({peer_name("controller"), peer_name("transferqueue")})
HEALTH = "/grpc.health.v1.Health/"

_refusals = RareLog(logger)
_caller: ContextVar[str] = ContextVar("caller", default=SERVICES)


def caller_run() -> str | None:
    """Returns the run of the worker whose request is being served; None if a service sent it."""
    caller = _caller.get()
    return None if caller == SERVICES else caller


def authenticate(identity: Identity, method: str, authorization: str) -> None:
    """Identifies the caller before its request is read, and stores it for the rest of the call.

    Args:
        authorization: Value of the ``authorization`` header; empty if there is none.

    Raises:
        UnauthenticatedError: If the caller is unknown.
    """
    if not identity.is_known or method.startswith(HEALTH):
        return
    try:
        _caller.set(identity.bearer(authorization))
    except UnauthenticatedError:
        AUTH_FAILURES.labels("unauthenticated").inc()
        _refusals.warning("rejected a call without a valid token", method=method)
        raise


def check_peer_certificate(method: str, names: Iterable[bytes]) -> None:
    """Checks that the caller's certificate belongs to the bearer of its token.

    Raises:
        PermissionDeniedError: If the certificate belongs to another bearer.
    """
    if method.startswith(HEALTH):
        return
    bearer = _caller.get()
    if bearer == SERVICES:
        fitting = _NAMES_OF_SERVICES
    else:
        fitting = frozenset({peer_name("worker", bearer), ANY_WORKER})
    peer_names = {name.decode("latin-1") for name in names}
    if not peer_names & fitting:
        AUTH_FAILURES.labels("permission_denied").inc()
        _refusals.warning(
            "rejected a token with the certificate of another bearer", method=method, run=bearer
        )
        raise PermissionDeniedError(
            f"the token of {bearer} needs a certificate of {' or '.join(sorted(fitting))}, "
            f"got {', '.join(sorted(peer_names)) or 'none'}",
            method=method,
        )


def authorize(method: str, request: Any) -> None:
    """Checks that the authenticated caller may make a request.

    Raises:
        PermissionDeniedError: If the caller is a worker, and the request names another run or none.
    """
    bearer = _caller.get()
    if bearer != SERVICES and not _is_open(method, request, bearer):
        AUTH_FAILURES.labels("permission_denied").inc()
        _refusals.warning("rejected a worker's call", method=method, run=bearer)
        raise PermissionDeniedError(
            f"a worker of {bearer} may not call {method}, or only for its own run",
            method=method,
        )


def _is_open(method: str, request: Any, run_id: str) -> bool:
    """Returns True if a worker of a run may make a request."""
    if method in _CLOSED_TO_RUNS:
        return False
    return method in _OPEN_TO_RUNS or run_named_by(request) == run_id


def run_named_by(request: Any) -> str | None:
    """Returns the run that a request concerns; None if it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        run_id: str = request.run_id
        return run_id
    for name in ("partition_id", "scope"):
        if name in fields:
            return run_of(getattr(request, name))
    return None
