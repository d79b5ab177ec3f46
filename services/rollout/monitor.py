"""Reports gauges, adapts admission and detects stalls, once a second; tunes garbage collection."""

import asyncio
import gc
import math
from collections.abc import Callable, Mapping

from services.common.runspec.workers import rows_gauge
from services.rollout import metrics
from services.rollout.engines.base import Engine, EngineStats
from services.rollout.sampling.sampler import EpisodeWatch, GroupSampler
from services.wire.controller import WorkerSession

# Time constant of the moving sums, in seconds: older observations have weight exp(-age / this).
_REMEMBERED_S = 600.0
# Max relative change of the concurrency between two observations. After a larger change, the
# concurrency in between is unknown.
_STEADY = 0.2
# Almost constant concurrency does not determine the slope. A prior therefore assumes that half of a step's
# time is proportional to the number of samples; it has the weight of observations whose concurrency has a
# standard deviation of a tenth of its mean.
_ASSUMED_SHARE = 0.5
_ASSUMED_SPREAD = 0.1


class EngineStalledError(RuntimeError):
    """Reports that the engine has running requests but generates no token; only a restart helps."""


class ProgressWatch:
    """Detects a stalled engine from its gauges, which the caller samples periodically.

    Args:
        deadline_s: Max time without a token while requests run; may be changed.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._tokens_total = -1
        self._weight_version = -1
        self._since = 0.0

    def check(self, stats: EngineStats, *, now: float) -> None:
        """Compares the gauges with the previous check.

        Args:
            now: Monotonic seconds.

        Raises:
            EngineStalledError: If requests run and neither tokens nor weight version changed within
                the deadline.
        """
        counters = (stats.tokens_total, stats.weight_version)
        if (
            stats.num_running == 0
            or stats.is_asleep
            or counters != (self._tokens_total, self._weight_version)
        ):
            self._tokens_total, self._weight_version = counters
            self._since = now
        elif now - self._since > self.deadline_s:
            raise EngineStalledError(
                f"the engine has {stats.num_running} requests but generated no token for "
                f"{now - self._since:.0f} s; this worker exits so that other workers take over its groups"
            )


class DecodeTimes:
    """Fits an engine's decode step time, ``fixed + samples * per_sample``, to its gauges."""

    def __init__(self) -> None:
        self._last_stats: tuple[float, EngineStats] | None = None
        self._sums = [0.0] * 5
        self._most = 0.0

    def observe(self, stats: EngineStats, *, now: float) -> None:
        """Adds the gauges at time ``now`` in seconds; skips intervals in which nothing was decoded."""
        last, self._last_stats = self._last_stats, (now, stats)
        if last is None:
            return
        then, before = last
        busy_s = now - then - (stats.idle_seconds - before.idle_seconds)
        tokens = stats.tokens_total - before.tokens_total
        if busy_s <= 0 or tokens <= 0 or not (stats.num_running and before.num_running):
            return
        if abs(stats.num_running - before.num_running) > _STEADY * before.num_running:
            return
        samples = (stats.num_running + before.num_running) / 2
        step_s = samples * busy_s / tokens
        rest = math.exp(-busy_s / _REMEMBERED_S)
        new = (1.0, samples, step_s, samples * samples, samples * step_s)
        # Weighted by tokens, not by time: a mean of ratios with varying denominators would be too large.
        self._sums = [rest * old + tokens * add for old, add in zip(self._sums, new, strict=True)]
        self._most = max(self._most, samples)

    def gauges(self) -> Mapping[str, float]:
        """Returns the fixed and per-sample seconds of a decode step, and the max concurrency observed."""
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
            "decode_max_samples": self._most,
        }


_EVERY_S = 1.0
# Observations per second, so that the concurrency hardly changes between two of them.
_LOOKS = 5
# A check of every episode costs more than a read of gauges.
_LOOK_S = 15.0
# Weight updates, which also cause checkpoints, may be an hour apart, and a killed process loses the tokens
# since its last checkpoint.
_CHECKPOINT_S = 60.0


async def monitor(
    session: WorkerSession,
    engine: Engine,
    sampler: GroupSampler,
    *,
    publish_wait_s: Callable[[], float],
) -> None:
    """Monitors the engine and the sampler until cancelled.

    Interrupts groups with an episode that generated no token and made no call within
    ``limits.stall_timeout_s``, which is read again each second. The process ends if the engine has
    running requests but generated no token for half of that time.

    Args:
        session: Receives the reports and has the current limits.
        sampler: Its admission limit is adapted to the load.
        publish_wait_s: Returns the age of the oldest unfinished publication.

    Raises:
        EngineStalledError: If the engine is stalled; the process must end.
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
        speculation: dict[str, float] = {}
        if stats.drafts is not None:
            speculation = {"acceptance_length": stats.drafts.acceptance_length}
            metrics.DRAFTS_TOTAL.set(stats.drafts.num_drafts)
            metrics.DRAFT_TOKENS_TOTAL.set(stats.drafts.num_tokens)
            metrics.ACCEPTED_DRAFT_TOKENS_TOTAL.set(stats.drafts.num_accepted)
            metrics.ACCEPTANCE_LENGTH.set(stats.drafts.acceptance_length)
        await sampler.admission.adapt(
            kv_used_fraction=stats.kv_used_fraction, publish_wait_s=publish_wait_s()
        )
        metrics.ADMISSION_LIMIT.set(sampler.admission.limit)
        session.report(
            gauges={
                **decoding.gauges(),
                **rows,
                **speculation,
                "running_samples": stats.num_running,
                "waiting_samples": stats.num_waiting,
                "tokens_total": stats.tokens_total,
                "idle_seconds": stats.idle_seconds,
            }
        )
        if stats.is_asleep:  # the other side uses the GPU, so no episode can progress
            episodes = EpisodeWatch(stall_s)
        try:
            progress.check(stats, now=clock())
        except EngineStalledError as error:
            await session.report_own_failure(str(error))
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


def freeze_startup_objects() -> None:
    """Excludes all existing objects from garbage collection and makes full collections rare.

    Modules, engine and data live as long as the process. By default, a full collection would run every half
    minute and block every episode for a quarter of a second. Full collections still run after some 700,000
    allocations: cycles of episodes that outlive the younger generations would otherwise take tens of
    megabytes. Young generations are collected as often as by default, because a collection takes longer the
    more objects have been allocated since the last one.
    """
    gc.collect()
    gc.freeze()
    # Collects nothing, but else the frozen objects would count as the survivors of the last full collection,
    # a quarter of which must have been added before the next one.
    gc.collect()
    gc.set_threshold(700, 10, 100)
