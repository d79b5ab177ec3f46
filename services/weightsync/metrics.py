"""Metrics of a member of a weight group; the controller measures the phases of a session."""

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from services.common.errors import DataLossError, DeadlineExceededError, UnavailableError
from services.common.telemetry.metrics import SYNC
from services.weightsync.transfer import TransferError, TransferOrder

# In the message of a collective of Gloo that missed its deadline.
_GLOO_LATE = "Timed out waiting"

MEMBER_SECONDS = Histogram(
    "slipstream_weight_sync_member_duration_seconds",
    "Time of a weight sync in one member, by phase.",
    ["phase"],
    buckets=SYNC,
)
MEMBER_BYTES = Counter(
    "slipstream_weight_sync_member_bytes_total", "Bytes of weights that a member sent or received."
)
SUPERSEDED = Counter(
    "slipstream_weight_sync_superseded_total",
    "Versions that a newer one replaced between their transfer and their adoption.",
)
REJECTED = Counter(
    "slipstream_weight_sync_rejected_total",
    "Versions that a rollout rejected, by the failed check.",
    ["reason"],
)
CANARY_DIFFERENCE = Gauge(
    "slipstream_weight_sync_canary_difference_nats",
    "Mean absolute difference of the canary's logprobs between trainer and rollout.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """Report of one member about a transfer."""

    digests: tuple[str, ...]
    """Digest of each source that took part, in order: one for a sender, all for a receiver."""
    num_bytes: int
    """Bytes sent or received."""
    seconds: float
    """Time from the order to the verified end."""


def explained(error: BaseException, order: TransferOrder) -> BaseException:
    """Converts the error of a failed transfer to the error that the controller receives."""
    match error:
        case TransferError():
            REJECTED.labels("checksum").inc()
            return DataLossError(str(error), version=order.version)
        case TimeoutError():
            return DeadlineExceededError(
                f"the transfer of version {order.version} took longer than {order.timeout_s} s",
                version=order.version,
            )
        case RuntimeError() if _GLOO_LATE in str(error):
            return DeadlineExceededError(
                f"the transfer of version {order.version} is too slow for its deadline, or a link between "
                f"members is interrupted: {error}",
                version=order.version,
            )
        case RuntimeError():
            return UnavailableError(
                f"the transfer of version {order.version} lost a member: {error}",
                version=order.version,
            )
    return error
