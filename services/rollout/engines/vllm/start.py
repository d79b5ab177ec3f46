"""Starts vLLM's engine with the batching scheduler."""

import multiprocessing
from dataclasses import replace

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

_SCHEDULERS = "services.rollout.engines.vllm.scheduler"
_ON_CPU = "services.rollout.engines.vllm.cpu_worker"


def start(arguments: AsyncEngineArgs, *, tells_experts: bool) -> AsyncLLM:
    """Starts an engine that sends tokens in batches.

    Args:
        arguments: Arguments of the engine.
        tells_experts: True to report the chosen experts with the tokens.

    Raises:
        ValueError: If the engine cannot report them.
    """
    tells_on_cpu = tells_experts and current_platform.is_cpu()
    if tells_experts and not tells_on_cpu:
        arguments = replace(arguments, enable_return_routed_experts=True)
    config = arguments.create_engine_config()
    if tells_on_cpu:
        if not config.cache_config.enable_prefix_caching:
            raise ValueError(
                "vLLM reports chosen experts only with prefix caching, which is unavailable on a CPU for "
                "latent attention and with rollout.engine_arguments.enable_prefix_caching false; set "
                "rollout.routing_replay to 'off'"
            )
        config.parallel_config.worker_cls = f"{_ON_CPU}.RoutingWorker"
        scheduler = f"{_ON_CPU}.RoutingScheduler"
    elif config.scheduler_config.async_scheduling:
        scheduler = f"{_SCHEDULERS}.BatchingAsyncScheduler"
    else:
        scheduler = f"{_SCHEDULERS}.BatchingScheduler"
    config.scheduler_config.scheduler_cls = scheduler
    if not current_platform.is_cpu():
        # vLLM would spawn its engine's process, which imports for tens of seconds. The fork server
        # of `begin_imports` has done that and has not initialized the GPU driver.
        utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        log_requests=False,
    )
