"""Once a second: gauges to the controller and to Prometheus, admission, liveness."""

import asyncio
import math
from collections.abc import Callable, Mapping

from services.controller.client import WorkerSession
from services.rollout import metrics
from services.rollout.client import rows_gauge
from services.rollout.engines.base import Engine, EngineStats
from services.rollout.sampling.liveness import EngineStalledError, EpisodeWatch, ProgressWatch
from services.rollout.sampling.sampler import GroupSampler

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


_EVERY_S = 1.0
# Of those a second, so that what is decoded at once hardly changes between two of them.
_LOOKS = 5
# Looking at every episode takes longer than reading gauges.
_LOOK_S = 15.0
# A version may take an hour to come, and a process that is killed loses what it sampled since it last cached.
_CHECKPOINT_S = 60.0


async def monitor(
    session: WorkerSession,
    engine: Engine,
    sampler: GroupSampler,
    *,
    publish_wait_s: Callable[[], float],
) -> None:
    """Watch until cancelled.

    An episode that makes no token and no call within ``limits.stall_timeout_s``, as it is then, is stopped.
    An engine that holds requests and makes no token at all ends in half of that.

    Args:
        session: Hears of it, and knows the limits.
        engine: Is watched.
        sampler: Its admission follows the pressure.
        publish_wait_s: How long the oldest unfinished publication has been waiting.

    Raises:
        EngineStalledError: If the engine is dead; the process has to end.
    """
    stall_s = session.spec.limits.stall_timeout_s
    progress, episodes = ProgressWatch(stall_s / 2), EpisodeWatch(stall_s)
    clock = asyncio.get_running_loop().time
    looked = cached = clock()
    rows = {rows_gauge(split): count for split, count in sampler.num_prompts().items()}
    decoding = DecodeTimes()
    while True:
        stall_s = session.spec.limits.stall_timeout_s
        progress.deadline_s, episodes.deadline_s = stall_s / 2, stall_s
        stats = engine.stats()
        metrics.RUNNING.set(stats.num_running)
        metrics.WAITING.set(stats.num_waiting)
        metrics.KV_USED.set(stats.kv_used_fraction)
        metrics.TOKENS_TOTAL.set(stats.tokens_total)
        metrics.PROMPT_TOKENS_TOTAL.set(stats.prompt_tokens_total)
        metrics.CACHED_TOKENS_TOTAL.set(stats.cached_tokens_total)
        metrics.RECOMPUTED_TOKENS_TOTAL.set(stats.recomputed_tokens_total)
        await sampler.admission.adapt(
            kv_used_fraction=stats.kv_used_fraction, publish_wait_s=publish_wait_s()
        )
        metrics.ADMISSION_LIMIT.set(sampler.admission.limit)
        session.report(
            gauges={
                **decoding.gauges(),
                **rows,
                "running_samples": stats.num_running,
                "waiting_samples": stats.num_waiting,
                "tokens_total": stats.tokens_total,
                "idle_seconds": stats.idle_seconds,
            }
        )
        if stats.is_asleep:  # others have its GPU: no episode can move
            episodes = EpisodeWatch(stall_s)
        try:
            progress.check(stats, now=clock())
        except EngineStalledError as error:
            session.report(state="failed", activity=str(error))
            raise
        if clock() - looked > min(stall_s / 4, _LOOK_S) and not stats.is_asleep:
            looked = clock()
            await sampler.stop_stalled(episodes, now=looked)
        if clock() - cached > _CHECKPOINT_S:
            cached = clock()
            sampler.checkpoint_soon()
        for _ in range(_LOOKS):
            decoding.observe(engine.stats(), now=clock())
            await asyncio.sleep(_EVERY_S / _LOOKS)
