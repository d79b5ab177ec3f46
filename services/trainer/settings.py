"""Settings of a trainer process."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.common.runspec.workers import WORKERS
from services.common.settings import WorkerSettings


class TrainerSettings(WorkerSettings):
    """Settings from ``SLIPSTREAM_TRAINER_*``; ``torchrun`` sets the ranks and the world size."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRAINER_", populate_by_name=True)

    role: str = "trainer"
    """Role of this process, a key of ``WORKERS``: it trains the policy or the critic, or only scores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto`` uses the GPU if there is one."""
    state_directory: Path = Path("runs")
    """Folder of the run; checkpoints go to ``checkpoints`` in it."""
    model_cache: Path = Path("~/.cache/slipstream/models")
    """Cache of base models that a warm start has trained."""
    gpu_neighbours: tuple[str, ...] = ()
    """Roles of the run's other workers that share this process's GPUs."""
    resume: bool = False
    """If True, the process fails unless there is a checkpoint to resume from. An existing checkpoint is
    always used, even if this is False.
    """
    rank: int = Field(0, ge=0, validation_alias="RANK")
    """Rank of this process among all trainer processes of the run."""
    local_rank: int = Field(0, ge=0, validation_alias="LOCAL_RANK")
    """Rank of this process on its host, which is the index of its GPU."""
    world_size: int = Field(1, ge=1, validation_alias="WORLD_SIZE")
    """Number of trainer processes of the run."""

    @field_validator("role")
    @classmethod
    def _is_served(cls, role: str) -> str:
        if role not in WORKERS or not WORKERS[role].serve:
            roles = [name for name, kind in WORKERS.items() if kind.serve]
            raise ValueError(f"role must be one of {', '.join(roles)}, but is {role!r}")
        return role
