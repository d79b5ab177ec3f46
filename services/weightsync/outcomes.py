"""How a transfer ended, in words for the controller."""

from dataclasses import dataclass

from services.common.errors import DataLossError, DeadlineExceededError, UnavailableError
from services.weightsync import metrics
from services.weightsync.transfer import TransferError, TransferOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """One member's view of a transfer."""

    digests: tuple[str, ...]
    """Of each source that took part, in order: one for a sender, all for a receiver."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """From the order to the verified end."""


def explained(error: BaseException, order: TransferOrder) -> BaseException:
    """What a failed transfer means to the controller."""
    match error:
        case TransferError():
            metrics.REFUSED.labels("checksum").inc()
            return DataLossError(str(error), version=order.version)
        case TimeoutError():
            return DeadlineExceededError(
                f"transfer of version {order.version} took longer than {order.timeout_s} s",
                version=order.version,
            )
        case RuntimeError():
            return UnavailableError(
                f"transfer of version {order.version} lost a member: {error}", version=order.version
            )
    return error
