"""Once a second: gauges to the controller and to Prometheus, admission, liveness."""

import asyncio
import time
from collections.abc import Callable

from services.controller.client import WorkerSession
from services.rollout import metrics
from services.rollout.engines.base import Engine
from services.rollout.liveness import EngineStalledError, ProgressWatch
from services.rollout.sampling import GroupSampler

_EVERY_S = 1.0


async def monitor(
    session: WorkerSession,
    engine: Engine,
    sampler: GroupSampler,
    *,
    publish_wait_s: Callable[[], float],
    stall_s: float,
) -> None:
    """Watch until cancelled.

    Args:
        session: Hears of it.
        engine: Is watched.
        sampler: Its admission follows the pressure.
        publish_wait_s: How long the oldest unfinished publication has been waiting.
        stall_s: Longest time that the engine may hold requests without making a token.

    Raises:
        EngineStalledError: If the engine is dead; the process has to end.
    """
    progress = ProgressWatch(stall_s)
    rows = {f"prompts_{split}": sampler.num_prompts(split) for split in ("train", "heldout")}
    while True:
        stats = engine.stats()
        metrics.RUNNING.set(stats.num_running)
        metrics.WAITING.set(stats.num_waiting)
        metrics.KV_USED.set(stats.kv_used_fraction)
        metrics.TOKENS_TOTAL.set(stats.tokens_total)
        metrics.PROMPT_TOKENS_TOTAL.set(stats.prompt_tokens_total)
        metrics.CACHED_TOKENS_TOTAL.set(stats.cached_tokens_total)
        await sampler.admission.adapt(
            kv_used_fraction=stats.kv_used_fraction, publish_wait_s=publish_wait_s()
        )
        metrics.ADMISSION_LIMIT.set(sampler.admission.limit)
        session.report(
            gauges={
                **rows,
                "running_samples": stats.num_running,
                "waiting_samples": stats.num_waiting,
                "tokens_total": stats.tokens_total,
                "idle_seconds": stats.idle_seconds,
            }
        )
        try:
            progress.check(stats, now=time.monotonic())
        except EngineStalledError as error:
            session.report(state="failed", activity=str(error))
            raise
        await asyncio.sleep(_EVERY_S)
