"""Once a second: gauges to the controller and to Prometheus, admission, liveness."""

import asyncio
from collections.abc import Callable

from services.controller.client import WorkerSession
from services.rollout import metrics
from services.rollout.client import rows_gauge
from services.rollout.decode_times import DecodeTimes
from services.rollout.engines.base import Engine
from services.rollout.liveness import EngineStalledError, EpisodeWatch, ProgressWatch
from services.rollout.sampling import GroupSampler

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
