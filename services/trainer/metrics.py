"""Prometheus metrics of the trainer; docs/metrics.md explains each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import STEP

if TYPE_CHECKING:
    from services.trainer.ranks.leader import SavedCheckpoint
    from services.trainer.steps.step import StepResult

STEPS = Counter("slipstream_trainer_steps_total", "Trained steps by outcome.", ["run", "outcome"])
STEP_SECONDS = Histogram(
    "slipstream_trainer_step_duration_seconds", "Time of a step by phase.", ["run", "phase"],
    buckets=STEP,
)  # fmt: skip
TOKENS = Counter("slipstream_trainer_tokens_total", "Trained tokens by kind.", ["run", "kind"])
IDLE_SECONDS = Counter(
    "slipstream_trainer_idle_seconds_total", "Idle time by reason.",
    ["run", "reason"],
)  # fmt: skip
MFU = Gauge(
    "slipstream_trainer_mfu_ratio", "Model FLOPs utilization of the newest step.",
    ["run"],
)  # fmt: skip
TOKEN_RATE = Gauge(
    "slipstream_trainer_tokens_per_second", "Tokens per second of the newest step.", ["run"]
)
GPU_MEMORY = Gauge(
    "slipstream_trainer_gpu_memory_bytes", "GPU memory of rank 0 by kind.", ["run", "kind"]
)
CHECKPOINTS = Counter("slipstream_checkpoints_total", "Checkpoints by outcome.", ["run", "outcome"])
CHECKPOINT_SECONDS = Histogram(
    "slipstream_checkpoint_duration_seconds",
    "Time of a checkpoint by phase; only the snapshot blocks training.",
    ["run", "phase"],
    buckets=STEP,
)
CHECKPOINT_STEP = Gauge(
    "slipstream_checkpoint_last_success_step", "Step of the newest checkpoint.", ["run"]
)
CHECKPOINT_TIME = Gauge(
    "slipstream_checkpoint_last_success_timestamp_seconds",
    "Time of the newest checkpoint.",
    ["run"],
)
CHECKPOINT_BYTES = Gauge(
    "slipstream_checkpoint_size_bytes", "Size of the newest checkpoint.", ["run"]
)
SAVING_BYTES = Gauge(
    "slipstream_checkpoint_saving_bytes", "Written and total bytes of the checkpoint that is being saved.",
    ["run", "part"],
)  # fmt: skip
UPLOAD_BYTES = Gauge(
    "slipstream_checkpoint_upload_bytes", "Uploaded and total bytes of the checkpoint in upload.",
    ["run", "part"],
)  # fmt: skip
UPLOAD_FAILING = Gauge(
    "slipstream_checkpoint_upload_failing_seconds", "Time since uploads to the object store fail, or 0.",
    ["run"],
)  # fmt: skip
UPLOADED_STEP = Gauge(
    "slipstream_checkpoint_uploaded_step",
    "Step of the newest checkpoint that the object store has.",
    ["run"],
)
FREE_BYTES = Gauge(
    "slipstream_checkpoint_volume_free_bytes", "Free bytes on the checkpoint volume after the newest save.",
    ["run"],
)  # fmt: skip
WEIGHT_VERSION = Gauge("slipstream_trainer_weight_version", "Steps trained.", ["run"])
NONFINITE = Counter(
    "slipstream_trainer_nonfinite_total", "Non-finite values by kind.", ["run", "what"]
)
OVERFLOWS = Counter(
    "slipstream_trainer_overflow_updates_total",
    "Updates that overflowed in float16 and were skipped.",
    ["run", "model"],
)
LOSS_SCALE = Gauge(
    "slipstream_trainer_loss_scale", "Factor of the loss in float16 training.", ["run", "model"]
)
LEFT_OUT = Counter(
    "slipstream_trainer_left_out_sequences_total",
    "Sequences that did not fit into memory.",
    ["run"],
)
KL = Gauge("slipstream_train_kl_divergence_nats", "KL divergence of two policies.", ["run", "pair"])
_GAUGES = {
    name: Gauge(f"slipstream_train_{suffix}", text, ["run"])
    for name, suffix, text in (
        ("loss", "loss", "Loss of the newest step."),
        ("reward_mean", "reward_mean", "Mean task reward."),
        ("reward_std", "reward_std", "Standard deviation of the task reward."),
        ("entropy", "entropy_nats", "Mean entropy of the policy."),
        ("clip_fraction", "clip_ratio", "Fraction of tokens whose ratio was clipped."),
        ("is_clipped_fraction", "is_clipped_ratio", "Fraction of tokens with a capped importance weight."),
        ("is_weight_mean", "is_weight", "Mean importance weight."),
        ("ess", "ess_ratio", "Effective sample size relative to the number of samples."),
        ("grad_norm", "grad_norm", "Global gradient norm before clipping."),
        ("learning_rate", "learning_rate", "Learning rate."),
        ("rejected_fraction", "rejected_ratio", "Fraction of tokens that a rejection mask removed."),
        ("zero_advantage_fraction", "zero_advantage_ratio", "Fraction of tokens with advantage 0."),
        ("shared_token_fraction", "shared_token_ratio", "Fraction of tokens shared by several samples."),
        ("rank_tokens_ratio", "rank_tokens_ratio", "Tokens of the most loaded rank relative to the mean."),
        ("pipeline_bubble", "pipeline_bubble_ratio", "Planned idle share of a pipeline stage's passes."),
        ("pack_fill", "pack_fill_ratio", "Tokens of a micro-batch relative to its limit."),
        ("rollout_logprob_abs_diff_max", "logprob_abs_diff", "Max logprob gap of rollout and trainer."),
    )
}  # fmt: skip
RANK_TOKENS = Gauge(
    "slipstream_train_rank_tokens",
    "Tokens that a rank computed in the newest step.",
    ["run", "stat"],
)
_NONFINITE = ("reward", "logprob", "loss", "grad", "critic")
_LABELLED = {
    "kl_rollout": (KL, "policy_rollout"),
    "kl_ref": (KL, "policy_ref"),
    "rank_tokens_min": (RANK_TOKENS, "min"),
    "rank_tokens_max": (RANK_TOKENS, "max"),
    "gpu_memory_peak_bytes": (GPU_MEMORY, "peak"),
    "gpu_memory_reserved_bytes": (GPU_MEMORY, "reserved"),
    "gpu_memory_driver_bytes": (GPU_MEMORY, "driver"),
}


def observe_step(run: str, step: int, result: "StepResult") -> None:
    """Exports the metrics of a step."""
    metrics = result.metrics
    skipped = "skipped_overflow" if result.overflowed else "skipped_nonfinite"
    STEPS.labels(run, skipped if result.skipped else "ok").inc()
    WEIGHT_VERSION.labels(run).set(step)
    observe_loss_scale(run, metrics)
    for name, value in metrics.items():
        if name.startswith("seconds_"):
            STEP_SECONDS.labels(run, name.removeprefix("seconds_")).observe(value)
        elif name.startswith("idle_seconds_"):
            IDLE_SECONDS.labels(run, name.removeprefix("idle_seconds_")).inc(value)
        elif name in _GAUGES:
            _GAUGES[name].labels(run).set(value)
        elif name in _LABELLED:
            gauge, label = _LABELLED[name]
            gauge.labels(run, label).set(value)
    for kind in _NONFINITE:
        NONFINITE.labels(run, kind).inc(metrics.get(f"nonfinite_{kind}", 0.0))
    LEFT_OUT.labels(run).inc(metrics.get("left_out_sequences", 0.0))
    if "mfu" in metrics:
        MFU.labels(run).set(metrics["mfu"])
    if "tokens" in metrics:
        TOKEN_RATE.labels(run).set(metrics["tokens_per_s"])
        TOKENS.labels(run, "response").inc(metrics["response_tokens"])
        TOKENS.labels(run, "prompt").inc(metrics["tokens"] - metrics["response_tokens"])


def observe_loss_scale(run: str, metrics: Mapping[str, float]) -> None:
    """Exports the loss scales of a step and its updates that overflowed."""
    for model, prefix in (("policy", ""), ("critic", "critic_")):
        if f"{prefix}loss_scale" in metrics:
            LOSS_SCALE.labels(run, model).set(metrics[f"{prefix}loss_scale"])
            OVERFLOWS.labels(run, model).inc(metrics[f"{prefix}overflow_updates"])


def begin_run(run: str) -> None:
    """Creates the counters of a run at 0; an alert on growth would miss one that first appears at 1."""
    for outcome in ("ok", "failed"):
        CHECKPOINTS.labels(run, outcome)
    for kind in _NONFINITE:
        NONFINITE.labels(run, kind)
    LEFT_OUT.labels(run)


@contextmanager
def counted_checkpoint(run: str) -> Iterator[None]:
    """Counts the block as a checkpoint that succeeded or failed."""
    outcome = "failed"
    try:
        yield
        outcome = "ok"
    finally:
        CHECKPOINTS.labels(run, outcome).inc()


def observe_saving(run: str, num_written: int, total: int) -> None:
    """Exports the progress of a checkpoint in bytes; zeros if none is running."""
    SAVING_BYTES.labels(run, "written").set(num_written)
    SAVING_BYTES.labels(run, "all").set(total)


def observe_checkpoint(run: str, step: int, checkpoint: "SavedCheckpoint") -> None:
    """Exports size, time and free space of a saved checkpoint."""
    for phase, duration_s in checkpoint.seconds.items():
        CHECKPOINT_SECONDS.labels(run, phase).observe(duration_s)
    CHECKPOINT_STEP.labels(run).set(step)
    CHECKPOINT_BYTES.labels(run).set(checkpoint.num_bytes)
    FREE_BYTES.labels(run).set(checkpoint.free_bytes)
    CHECKPOINT_TIME.labels(run).set_to_current_time()
