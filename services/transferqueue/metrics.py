"""Prometheus metrics of the transferqueue."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import RPC

OPS = Counter("slipstream_tq_ops", "Operations on the data sockets.", ["op", "code"])
OP_DURATION = Histogram(
    "slipstream_tq_op_duration_seconds", "Time of an operation.", ["op"], buckets=RPC
)
BYTES = Counter("slipstream_tq_bytes", "Bytes of samples that came in or went out.", ["direction"])
BYTES_IN, BYTES_OUT = BYTES.labels("in"), BYTES.labels("out")
STORED_BYTES = Gauge("slipstream_tq_stored_bytes", "Bytes in use on this shard.")
CAPACITY_BYTES = Gauge("slipstream_tq_capacity_bytes", "Bytes that this shard can hold.")
SHARDS = Gauge("slipstream_tq_shards", "Shards that the index hears of; 0 on shards themselves.")
SAMPLES = Gauge("slipstream_tq_samples", "Samples in the index.")
KEPT = Counter("slipstream_kept_samples", "Samples that were kept to be read.")
NOT_KEPT = Counter("slipstream_kept_samples_failed", "Records of samples that could not be kept.")
BACKPRESSURE = Counter(
    "slipstream_tq_backpressure_seconds", "Time that producers waited for room.", ["run"]
)
REJECTED = Counter(
    "slipstream_rejected_messages", "Messages that were refused.", ["channel", "reason"]
)
for _reason in ("malformed", "foreign", "unauthenticated", "peer_gone"):
    # Prometheus rules do not see the increase of a counter that first appears with 1.
    REJECTED.labels("data", _reason)
