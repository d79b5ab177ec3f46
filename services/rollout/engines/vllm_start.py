"""Starts vLLM's engine with our scheduler."""

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

_SCHEDULERS = "services.rollout.engines.vllm_scheduler"


def start(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Start an engine whose tokens come in batches."""
    config = arguments.create_engine_config()
    kind = (
        "GatheringAsyncScheduler"
        if config.scheduler_config.async_scheduling
        else "GatheringScheduler"
    )
    config.scheduler_config.scheduler_cls = f"{_SCHEDULERS}.{kind}"
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        log_requests=False,
    )
