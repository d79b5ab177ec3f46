"""Paired ratios with bootstrap confidence intervals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one side relative to the other."""

    middle: float
    low: float
    """2.5 % quantile of the bootstrap medians."""
    high: float


def paired_ratio(slow_s: Sequence[float], fast_s: Sequence[float]) -> Ratio:
    """Returns the median ratio of pairs that were measured in succession."""
    ratios = [slow / fast for slow, fast in zip(slow_s, fast_s, strict=True)]
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
    return Ratio(median(ratios), low, high)
