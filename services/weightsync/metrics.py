"""What a member of a weight group measures; the controller measures the phases of a session."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.metrics import SYNC

MEMBER_SECONDS = Histogram(
    "slipstream_weight_sync_member_duration_seconds",
    "Time of one member's part in a weight sync, by phase.",
    ["phase"],
    buckets=SYNC,
)
MEMBER_BYTES = Counter(
    "slipstream_weight_sync_member_bytes_total", "Bytes of weights that a member sent or received."
)
SUPERSEDED = Counter(
    "slipstream_weight_sync_superseded_total",
    "Versions that were received and replaced by a newer one before they were served.",
)
REFUSED = Counter(
    "slipstream_weight_sync_refused_total",
    "Versions that a rollout refused, by what did not agree.",
    ["reason"],
)
CANARY_DIFFERENCE = Gauge(
    "slipstream_weight_sync_canary_difference_nats",
    "Mean absolute difference of the canary's logprobs between trainer and rollout.",
)
