"""Paired ratios with bootstrap confidence intervals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one side is."""

    middle: float
    low: float
    """2.5 % of the bootstrap medians."""
    high: float


def paired_ratio(slow_s: Sequence[float], fast_s: Sequence[float]) -> Ratio:
    """Median of the ratios of pairs that were measured one right after the other."""
    ratios = [slow / fast for slow, fast in zip(slow_s, fast_s, strict=True)]
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
    return Ratio(median(ratios), low, high)
