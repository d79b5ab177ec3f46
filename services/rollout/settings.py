"""Where a rollout process lives."""

import os
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import WorkerSettings


class RolloutSettings(WorkerSettings):
    """Read from ``SLIPSTREAM_ROLLOUT_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_ROLLOUT_")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; ``auto`` takes the GPU if there is one."""
    gpu_neighbours: tuple[str, ...] = ()
    """Roles of the other workers that have the same GPU, where a host has too few; the engine leaves
    them room."""
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
