"""Prometheus metrics of the trainer; docs/metrics.md explains each."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.common.metrics import STEP

STEPS = Counter("slipstream_trainer_steps_total", "Trained steps by outcome.", ["run", "outcome"])
STEP_SECONDS = Histogram(
    "slipstream_trainer_step_duration_seconds", "Time of a step by phase.", ["run", "phase"],
    buckets=STEP,
)  # fmt: skip
TOKENS = Counter("slipstream_trainer_tokens_total", "Trained tokens by kind.", ["run", "kind"])
IDLE_SECONDS = Counter(
    "slipstream_trainer_idle_seconds_total", "Time without work, by what was waited for.",
    ["run", "reason"],
)  # fmt: skip
WEIGHT_VERSION = Gauge("slipstream_trainer_weight_version", "Steps trained.", ["run"])
NONFINITE = Counter(
    "slipstream_trainer_nonfinite_total", "Numbers that were not finite.", ["run", "what"]
)
KL = Gauge("slipstream_train_kl_divergence_nats", "Divergence of two policies.", ["run", "pair"])
_GAUGES = {
    name: Gauge(f"slipstream_train_{suffix}", text, ["run"])
    for name, suffix, text in (
        ("loss", "loss", "Loss of the newest step."),
        ("reward_mean", "reward_mean", "Mean task reward."),
        ("reward_std", "reward_std", "Standard deviation of the task reward."),
        ("entropy", "entropy_nats", "Mean entropy of the policy."),
        ("clip_fraction", "clip_ratio", "Tokens whose ratio was clipped."),
        ("is_clipped_fraction", "is_clipped_ratio", "Tokens whose importance weight passed the cap."),
        ("is_weight_mean", "is_weight", "Mean importance weight."),
        ("ess", "ess_ratio", "Effective sample size over samples."),
        ("grad_norm", "grad_norm", "Global gradient norm before clipping."),
        ("learning_rate", "learning_rate", "Learning rate."),
        ("rejected_fraction", "rejected_ratio", "Tokens that a rejection mask took out."),
        ("zero_advantage_fraction", "zero_advantage_ratio", "Tokens without an advantage."),
        ("rollout_logprob_abs_diff_max", "logprob_abs_diff", "Largest rollout-to-trainer gap."),
    )
}  # fmt: skip
_KL_PAIRS = {"kl_rollout": "policy_rollout", "kl_ref": "policy_ref"}


def observe_step(run: str, step: int, metrics: Mapping[str, float], *, skipped: bool) -> None:
    """Export a step's numbers.

    Args:
        run: The run.
        step: Number of the step.
        metrics: Reduced numbers by name.
        skipped: Whether the weights stayed as they were.
    """
    STEPS.labels(run, "skipped_nonfinite" if skipped else "ok").inc()
    WEIGHT_VERSION.labels(run).set(step)
    for name, value in metrics.items():
        if name.startswith("seconds_"):
            STEP_SECONDS.labels(run, name.removeprefix("seconds_")).observe(value)
        elif name in _GAUGES:
            _GAUGES[name].labels(run).set(value)
        elif name in _KL_PAIRS:
            KL.labels(run, _KL_PAIRS[name]).set(value)
    NONFINITE.labels(run, "input").inc(metrics.get("nonfinite_inputs", 0.0))
    NONFINITE.labels(run, "gradient").inc(metrics.get("nonfinite_updates", 0.0))
    if "tokens" in metrics:
        TOKENS.labels(run, "response").inc(metrics["response_tokens"])
        TOKENS.labels(run, "prompt").inc(metrics["tokens"] - metrics["response_tokens"])
