"""Where a rollout process lives."""

from typing import Literal

from pydantic_settings import SettingsConfigDict

from services.common.settings import WorkerSettings


class RolloutSettings(WorkerSettings):
    """Read from ``SLIPSTREAM_ROLLOUT_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_ROLLOUT_")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; ``auto`` takes the GPU if there is one."""
