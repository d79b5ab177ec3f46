"""How long an engine's decode steps take, by the number of samples that it decodes at once.

Whatever the engine is: from what its gauges say once a second. A line is fitted, for that is what decoding
costs: a part for each step (reading the weights, launching kernels) and a part for each sample in it. The
controller says from it what another concurrency would give.
"""

import math
from collections.abc import Mapping

from services.rollout.engines.base import EngineStats

# Seconds after which what was seen counts a third.
_REMEMBERED_S = 600.0
# By how much the concurrency may change between two looks: what it was meanwhile is not known otherwise.
_STEADY = 0.2
# Where the concurrency hardly varies no slope can be seen: half of a step is then taken to be for its
# samples. That assumption weighs as much as a spread of a tenth of the concurrency.
_ASSUMED_SHARE = 0.5
_ASSUMED_SPREAD = 0.1


class DecodeTimes:
    """Learns from an engine's gauges."""

    def __init__(self) -> None:
        self._seen: tuple[float, EngineStats] | None = None
        self._sums = [0.0] * 5
        self._most = 0.0

    def observe(self, stats: EngineStats, *, now: float) -> None:
        """Take in the gauges at a moment, in seconds; time in which nothing was decoded says nothing."""
        seen, self._seen = self._seen, (now, stats)
        if seen is None:
            return
        then, before = seen
        passed = now - then - (stats.idle_seconds - before.idle_seconds)
        tokens = stats.tokens_total - before.tokens_total
        if passed <= 0 or tokens <= 0 or not (stats.num_running and before.num_running):
            return
        if abs(stats.num_running - before.num_running) > _STEADY * before.num_running:
            return
        samples = (stats.num_running + before.num_running) / 2
        step_s = samples * passed / tokens
        kept = math.exp(-passed / _REMEMBERED_S)
        new = (1.0, samples, step_s, samples * samples, samples * step_s)
        # By tokens, not by time: the mean of ratios whose denominators vary would be too large.
        self._sums = [kept * old + tokens * one for old, one in zip(self._sums, new, strict=True)]
        self._most = max(self._most, samples)

    def gauges(self) -> Mapping[str, float]:
        """Seconds of a step, whatever it decodes and for each sample in it, and up to how many were seen."""
        weight, samples, step_s, squares, products = self._sums
        if not weight:
            return {}
        mean, mean_s = samples / weight, step_s / weight
        assumed = _ASSUMED_SHARE * mean_s / mean
        prior = (_ASSUMED_SPREAD * mean) ** 2
        variance = max(0.0, squares / weight - mean * mean)
        slope = (products / weight - mean * mean_s + prior * assumed) / (variance + prior)
        slope = min(max(slope, 0.0), mean_s / mean)
        return {
            "decode_fixed_s": mean_s - slope * mean,
            "decode_sample_s": slope,
            "decode_most_samples": self._most,
        }
