"""Prometheus metrics of the transferqueue."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import RPC

OPS = Counter("slipstream_tq_ops", "Operations on the data sockets.", ["op", "code"])
OP_DURATION = Histogram(
    "slipstream_tq_op_duration_seconds", "Time of an operation.", ["op"], buckets=RPC
)
BYTES = Counter("slipstream_tq_bytes", "Bytes of samples received and sent.", ["direction"])
BYTES_IN, BYTES_OUT = BYTES.labels("in"), BYTES.labels("out")
STORED_BYTES = Gauge("slipstream_tq_stored_bytes", "Bytes in use on this shard.")
CAPACITY_BYTES = Gauge("slipstream_tq_capacity_bytes", "Memory capacity of this shard in bytes.")
SHARDS = Gauge(
    "slipstream_tq_shards", "Live shards that are registered at the index; 0 on shards themselves."
)
SAMPLES = Gauge("slipstream_tq_samples", "Samples in the index.")
SAMPLE_RECORDS = Counter("slipstream_sample_records", "Sample records that were stored.")
SAMPLE_RECORDS_FAILED = Counter(
    "slipstream_sample_records_failed", "Sample records that could not be stored."
)
SAMPLE_UPLOAD_FAILING = Gauge(
    "slipstream_sample_upload_failing_seconds",
    "Time since uploads of samples to the object store fail, or 0.",
    ["run"],
)
BACKPRESSURE = Counter(
    "slipstream_tq_backpressure_seconds",
    "Time that producers waited for free memory or quota.",
    ["run"],
)
REJECTED = Counter(
    "slipstream_rejected_messages", "Messages that were rejected.", ["channel", "reason"]
)
for _reason in ("malformed", "foreign", "unauthenticated", "peer_gone"):
    # Prometheus rules do not see the increase of a counter that first appears with 1.
    REJECTED.labels("data", _reason)
