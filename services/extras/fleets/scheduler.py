"""Scheduler inside the engine process of a fleet's vLLM server: gathers the tokens of the run's requests.

Requests of others, such as those of runs with adapters, leave the engine as vLLM's own scheduler sends them.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutput

from services.extras.fleets.protocol import REQUESTS
from services.extras.vllm.scheduler import (
    BatchingAsyncScheduler,
    BatchingScheduler,
    TokenBatcher,
)


class FleetBatcher(TokenBatcher):
    """Gathers the tokens of requests whose names begin with ``protocol.REQUESTS``."""

    def passed(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        own_outputs = [o for o in outputs if o.request_id.startswith(REQUESTS)]
        if len(own_outputs) == len(outputs):
            return super().passed(outputs)
        others = [o for o in outputs if not o.request_id.startswith(REQUESTS)]
        return [*others, *super().passed(own_outputs)]


def fleet_scheduler(*args: Any, **options: Any) -> Any:
    """Returns the scheduler of a server (``--scheduler-cls``), for synchronous or asynchronous steps."""
    config = options["vllm_config"] if "vllm_config" in options else args[0]
    is_async = config.scheduler_config.async_scheduling
    scheduler = (BatchingAsyncScheduler if is_async else BatchingScheduler)(*args, **options)
    scheduler._gatherer = FleetBatcher(config.scheduler_config.stream_interval)  # noqa: SLF001
    return scheduler
