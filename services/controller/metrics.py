"""Prometheus metrics of the controller."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import RPC, SYNC

RUN_STEP = Gauge("slipstream_run_step", "Number of finished trainer steps.", ["run"])
PROMPTS = Gauge("slipstream_prompts", "Number of groups in each ledger state.", ["run", "state"])
LAST_PROGRESS = Gauge(
    "slipstream_run_last_progress_timestamp_seconds",
    "Time at which the run last finished a step.",
    ["run"],
)
LATE_GROUPS = Counter(
    "slipstream_late_groups_total",
    "Results discarded because the group had been dispatched to another rollout.",
)
STALENESS_VIOLATIONS = Counter(
    "slipstream_staleness_violations_total",
    "Steps that trained tokens staler than algorithm.max_staleness.",
    ["run"],
)
SAMPLE_STALENESS = Histogram(
    "slipstream_sample_staleness_versions",
    "Staleness of the oldest trained token of each trained sample.",
    ["run"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
)
WEIGHT_SYNC_SECONDS = Histogram(
    "slipstream_weight_sync_duration_seconds",
    "Time from a finished step to every rollout serving its weights, by phase.",
    ["run", "phase"],
    buckets=SYNC,
)
WEIGHT_SYNC_BYTES = Counter(
    "slipstream_weight_sync_bytes_total", "Total size of published versions.", ["run"]
)
WEIGHT_SYNCS = Counter(
    "slipstream_weight_syncs_total",
    "Attempts to publish a version, by outcome: ok, or the reason of the failure.",
    ["run", "outcome"],
)
STORED_VERSIONS = Gauge(
    "slipstream_weight_store_versions",
    "Copies of weight versions in the store of ``weight_sync.backend: storage``.",
    ["run"],
)
STORE_FAILING_SECONDS = Gauge(
    "slipstream_weight_store_failing_seconds",
    "Longest time for which the weight store has failed for a member of the run; 0 if it does not fail.",
    ["run"],
)
WEIGHT_GROUP_EPOCH = Gauge(
    "slipstream_weight_sync_group_epoch",
    "Epoch of the weight group; grows with each change of members.",
    ["run"],
)
WEIGHT_GROUP_SIZE = Gauge(
    "slipstream_weight_sync_group_size", "Trainer ranks and rollouts in the weight group.", ["run"]
)
SKIPPED_PROMPTS = Gauge(
    "slipstream_prompts_skipped",
    "Prompts that are temporarily skipped because they are solved or hopeless.",
    ["run", "reason"],
)
DISPATCH_SECONDS = Histogram(
    "slipstream_dispatch_duration_seconds",
    "Time from a group becoming eligible to start until a rollout accepts it.",
    ["run"],
    buckets=RPC,
)
HTTP_SECONDS = Histogram(
    "slipstream_http_request_duration_seconds",
    "Time until a response of the REST API begins.",
    ["route", "method", "code"],
    buckets=RPC,
)

API_REFUSALS = Counter(
    "slipstream_api_refusals_total",
    "Requests that the API refused because of a limit or their origin, by reason.",
    ["reason"],
)
EVENT_STREAMS = Gauge("slipstream_event_streams", "Number of open streams of events and logs.")
for _reason in ("rate_limited", "too_many_streams"):
    API_REFUSALS.labels(_reason)

KEPT_S = 900.0
"""Seconds for which the series of an ended run stay, so that the last scrapes and alerts see its end."""
_OF_RUNS = (
    RUN_STEP,
    PROMPTS,
    LAST_PROGRESS,
    STALENESS_VIOLATIONS,
    SAMPLE_STALENESS,
    WEIGHT_SYNC_SECONDS,
    WEIGHT_SYNC_BYTES,
    WEIGHT_SYNCS,
    STORED_VERSIONS,
    STORE_FAILING_SECONDS,
    WEIGHT_GROUP_EPOCH,
    WEIGHT_GROUP_SIZE,
    SKIPPED_PROMPTS,
    DISPATCH_SECONDS,
)


def forget_run(run: str) -> None:
    """Removes the series of a run; without this, each run would add some 150 for ever."""
    for metric in _OF_RUNS:
        for family in metric.collect():
            rows = [sample.labels for sample in family.samples if sample.labels["run"] == run]
            for labels in {tuple(v for k, v in keys.items() if k != "le") for keys in rows}:
                metric.remove(*labels)


def observe_step(run: str, step: int, prompts: Mapping[str, int]) -> None:
    RUN_STEP.labels(run).set(step)
    LAST_PROGRESS.labels(run).set_to_current_time()
    for state, count in prompts.items():
        if state != "issued":
            PROMPTS.labels(run, state).set(count)


def observe_staleness(run: str, samples: Mapping[str, int]) -> None:
    """Records the staleness of a step's samples, given as counts by the bucket's upper bound."""
    STALENESS_VIOLATIONS.labels(run)  # a run without one reports 0
    histogram = SAMPLE_STALENESS.labels(run)
    for bound, count in samples.items():
        for _ in range(count):
            histogram.observe(int(bound))


def observe_group(run: str, epoch: int, size: int) -> None:
    """Records a formed weight group."""
    WEIGHT_GROUP_EPOCH.labels(run).set(epoch)
    WEIGHT_GROUP_SIZE.labels(run).set(size)


def observe_dispatch(run: str, num_groups: int, seconds: float) -> None:
    """Records that a rollout has accepted groups."""
    for _ in range(num_groups):
        DISPATCH_SECONDS.labels(run).observe(seconds)
