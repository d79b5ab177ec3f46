"""Errors that cross a service boundary, and their wire form.

    ServiceError
    |-- InvalidArgumentError     the request breaks a rule          INVALID_ARGUMENT
    |-- NotFoundError            a named object does not exist      NOT_FOUND
    |-- AlreadyExistsError       same id, other content             ALREADY_EXISTS
    |-- FailedPreconditionError  wrong state for this request       FAILED_PRECONDITION
    |-- AbortedError             a concurrent writer was faster     ABORTED
    |-- ResourceExhaustedError   no space now; has a retry time     RESOURCE_EXHAUSTED
    |-- UnavailableError         the peer cannot be reached         UNAVAILABLE
    |-- DeadlineExceededError    the deadline passed                DEADLINE_EXCEEDED
    |-- DataLossError            bytes are damaged or lost          DATA_LOSS
    |-- UnauthenticatedError     the caller is unknown              UNAUTHENTICATED
    |-- PermissionDeniedError    the caller lacks permission        PERMISSION_DENIED
    `-- InternalError            a fault in the service             INTERNAL

On the wire an error is a ``google.rpc.Status`` with one ``ErrorInfo`` (AIP-193): ``reason`` is the
class's stable code, ``metadata`` has the variable parts of the message.
"""

from collections.abc import Iterable
from itertools import accumulate, takewhile
from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "slipstream"
# gRPC clients drop the status of a call whose headers exceed 8 KiB, and report RESOURCE_EXHAUSTED
# instead. A message is sent twice: as UTF-8, and in a header with escapes.
_HEAD_BYTES = 4000
_TAIL_BYTES = 2000
_METADATA_BYTES = 1200


class ServiceError(Exception):
    """Base class of all errors that a service reports to its callers.

    Args:
        message: Expected value, actual value, and the fix.
        metadata: The variable parts of the message, by name.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls) -> None:
        """Sets ``reason`` to the name of the code for a class that defines only ``code``."""
        if "code" in vars(cls) and "reason" not in vars(cls):
            cls.reason = cls.code.name

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def __str__(self) -> str:
        # Callers that pass an error on may prefix its message, so this is not args[0].
        return self.message


class InvalidArgumentError(ServiceError):
    """The request breaks a rule, independent of the state of the service."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(ServiceError):
    """An object that the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(ServiceError):
    """An object that the request would create exists with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(ServiceError):
    """The service is in the wrong state for this request."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(ServiceError):
    """A concurrent writer was faster."""

    code = grpc.StatusCode.ABORTED


class ResourceExhaustedError(ServiceError):
    """There is no space now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **metadata: object) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **metadata)

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a retry makes sense."""
        return float(self.metadata["retry_after_s"])


class UnavailableError(ServiceError):
    """The peer cannot be reached or is not ready."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(ServiceError):
    """The deadline passed before a response arrived."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class DataLossError(ServiceError):
    """Bytes are damaged or lost."""

    code = grpc.StatusCode.DATA_LOSS


class UnauthenticatedError(ServiceError):
    """The caller is unknown."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    """The caller lacks permission."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(ServiceError):
    """A fault in the service."""


def to_status(error: ServiceError) -> grpc.Status:
    """Returns the gRPC status that carries ``error``; a message that is too long loses its middle."""
    metadata = {
        name: value[: _METADATA_BYTES // (4 * len(error.metadata))]
        for name, value in error.metadata.items()
    }
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    number: int = error.code.value[0]
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=number, message=_shortened(error.message), details=[detail])
    )
    return status


def _shortened(message: str) -> str:
    """Returns the beginning and the end of a message that is too long for a status."""
    message = message.encode(errors="backslashreplace").decode()
    head = _num_fitting(message, _HEAD_BYTES)
    rest = message[head:]
    tail = _num_fitting(reversed(rest), _TAIL_BYTES)
    return message if tail == len(rest) else f"{message[:head]} [...] {rest[len(rest) - tail :]}"


def _num_fitting(text: Iterable[str], max_bytes: int) -> int:
    """Returns how many characters of a text take up to ``max_bytes`` in a status."""
    sizes = accumulate(2 if " " <= char <= "~" else 4 * len(char.encode()) for char in text)
    return sum(1 for _ in takewhile(lambda size: size <= max_bytes, sizes))


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> ServiceError:
    """Converts a gRPC error to the class that the peer raised.

    Args:
        peer: Name of the peer and method, for errors that grpc itself created.
    """
    info = _error_info(error)
    if info is None:
        cls = _BY_CODE.get(error.code(), InternalError)
        return _build(cls, f"{peer}: {error.details() or error.code().name}", {})
    cls = _by_reason().get(info.reason) or _BY_CODE.get(error.code(), InternalError)
    return _build(cls, error.details() or "", dict(info.metadata))


def from_reason(reason: str, message: str, metadata: dict[str, str]) -> ServiceError:
    """Builds the error for a stable reason that a peer reported without gRPC."""
    return _build(_by_reason().get(reason, InternalError), message, metadata)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
        if status.code == code_pb2.OK:
            return None
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                return info
    return None


def _build(cls: type[ServiceError], message: str, metadata: dict[str, str]) -> ServiceError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.message = message
    error.metadata = metadata
    if cls is ResourceExhaustedError:
        metadata.setdefault("retry_after_s", "1.0")
    return error


def _by_reason() -> dict[str, type[ServiceError]]:
    classes: dict[str, type[ServiceError]] = {}
    pending = [ServiceError]
    while pending:
        cls = pending.pop()
        # A class that inherits its reason does not replace the class that defines it.
        classes.setdefault(cls.reason, cls)
        pending.extend(cls.__subclasses__())
    classes["INTERNAL"] = InternalError
    return classes


_BY_CODE: dict[grpc.StatusCode, type[ServiceError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        AbortedError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        DataLossError,
        UnauthenticatedError,
        PermissionDeniedError,
        InternalError,
    )
}
_BY_CODE[grpc.StatusCode.CANCELLED] = UnavailableError
