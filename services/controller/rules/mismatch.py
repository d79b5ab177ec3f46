"""Decides when quantized rollouts must return to the trainer's precision. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import RunSpec

PATIENCE = 5
"""Number of newest steps whose mean divergence is compared with the limit."""
_FRESH = "kl_rollout_by_staleness/"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Divergence of quantized rollouts that exceeds ``rollout.max_mismatch``."""

    kl: float
    """Mean divergence of the newest steps in nats per token."""
    limit: float

    @property
    def message(self) -> str:
        """Describes the mismatch and its consequence, for people."""
        return (
            f"in the last {PATIENCE} steps the policy that samples diverged by {self.kl:.3g} nats per token "
            f"from the one that trains, more than rollout.max_mismatch ({self.limit:g}): rollouts restart in "
            "the trainer's precision"
        )


def divergence(step: Mapping[str, object]) -> float | None:
    """Returns the divergence of a step's least stale tokens in nats per token; None if not measured.

    The divergence of staler tokens also contains the change of the policy by training.

    Args:
        step: Metrics of the step by name.
    """
    names = sorted(name for name in step if name.startswith(_FRESH))
    value = step.get(names[0] if names else "kl_rollout")
    return float(value) if isinstance(value, int | float) else None


def mismatch(divergences: Sequence[float], spec: RunSpec) -> Mismatch | None:
    """Returns the mismatch for which rollouts must return to the trainer's precision; None if there is none.

    Args:
        divergences: Divergence of each step that these rollouts sampled, in order.
    """
    rollout, newest = spec.rollout, divergences[-PATIENCE:]
    if not rollout.is_quantized or rollout.max_mismatch is None or len(newest) < PATIENCE:
        return None
    mean = fmean(newest)
    return Mismatch(mean, rollout.max_mismatch) if mean > rollout.max_mismatch else None


def without_quantization(spec: RunSpec) -> RunSpec:
    """Returns a specification with rollouts in the trainer's precision and the same correction."""
    default = RolloutSpec.model_fields["max_mismatch"].default
    update = {
        "quantization": None,
        "unquantized_layers": 0,
        "kv_cache_dtype": None,
        "max_mismatch": default,
    }
    return spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update=update),
            "algorithm": spec.algorithm.model_copy(update={"correction": spec.correction}),
        }
    )
