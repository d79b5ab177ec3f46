"""Where a rollout process lives."""

import os
from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import WorkerSettings


class RolloutSettings(WorkerSettings):
    """Read from ``SLIPSTREAM_ROLLOUT_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_ROLLOUT_")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; ``auto`` takes the GPU if there is one."""
    agent_bind: str = "127.0.0.1:0"
    """``host:port`` where agents reach the policy (``rollout.workflow: agent``). Loopback serves agents on
    this machine or in this pod; bind to all interfaces only for an agent that runs elsewhere."""
    reward_hosts: tuple[str, ...] = ()
    """Hosts of reward services and agents that may be private, in lower case; public ones need no mention."""
    drain_timeout_s: float = Field(3.0, gt=0)
    """At SIGTERM, time to store what is unfinished; below the grace period of whoever sends it."""


def environment_of_user_code() -> dict[str, str]:
    """This process's environment without its own settings, among which is the run's token."""
    return {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 -- this is the settings module
        if not name.startswith("SLIPSTREAM_")
    }


def prepare_vllm_environment(*, is_cpu: bool) -> None:
    """Set what vLLM reads from the environment when it is imported; what is set already stays.

    Args:
        is_cpu: Whether its CPU build runs.
    """
    values = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if is_cpu:
        values |= _CPU_ENGINE | {
            # One child process instead of two.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Otherwise the first request for logprobs compiles a C++ kernel, for a minute.
            "TORCH_COMPILE_DISABLE": "1",
        }
    _set_defaults(values)


def prepare_sglang_environment(*, is_cpu: bool) -> None:
    """Set what SGLang reads from the environment when it is imported; what is set already stays.

    Args:
        is_cpu: Whether it runs on a CPU.
    """
    _set_defaults(_CPU_ENGINE | {"SGLANG_USE_CPU_ENGINE": "1"} if is_cpu else {})


_CPU_ENGINE = {
    # The threads of an engine's processes and of torch would fight over the cores.
    "OMP_NUM_THREADS": "1",
}


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)  # noqa: TID251 -- this is the settings module
