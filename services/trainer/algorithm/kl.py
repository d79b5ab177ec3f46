"""How strongly the KL penalty pulls, where it is to keep a distance. Pure."""

import math

from services.common.spec.algorithm import KlSpec

_MOST_ERROR = 0.2
_LEAST_FACTOR = 0.5


def adapted_kl(coefficient: float, kl: KlSpec, *, divergence: float, num_samples: int) -> float:
    """The coefficient, moved towards its target (Ziegler et al., arXiv:1909.08593).

    Args:
        coefficient: As it was.
        kl: The penalty.
        divergence: From the reference in a step; no number leaves the coefficient as it is.
        num_samples: Samples of the step.
    """
    # After a skipped step the divergence may be no number, and then the coefficient never was one again.
    if kl.target is None or not math.isfinite(divergence):
        return coefficient
    error = min(max(divergence / kl.target - 1.0, -_MOST_ERROR), _MOST_ERROR)
    # Over a horizon of few samples the formula would turn the sign, and reward leaving the reference.
    return coefficient * max(1.0 + error * num_samples / kl.horizon, _LEAST_FACTOR)
