"""Where a trainer process lives."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import WorkerSettings


class TrainerSettings(WorkerSettings):
    """Read from ``SLIPSTREAM_TRAINER_*``; the three ranks come from ``torchrun``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRAINER_", populate_by_name=True)

    role: Literal["trainer", "critic", "logp", "ref_logp"] = "trainer"
    """What this process does: train the policy or the critic, or only compute other logprobs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; ``auto`` takes the GPU if there is one."""
    state_directory: Path = Path("runs")
    """The run's own folder: checkpoints go to ``checkpoints`` in it."""
    model_cache: Path = Path("~/.cache/slipstream/models")
    """Folder of base models that were made by a warm start."""
    gpu_neighbours: tuple[str, ...] = ()
    """Roles of the other workers of the run that use this process's GPUs."""
    resume: bool = False
    """Whether there must be a checkpoint to start from; none is then an error, never a new beginning. A
    checkpoint that is there is always used."""
    rank: int = Field(0, ge=0, validation_alias="RANK")
    """This process among all trainer processes of the run."""
    local_rank: int = Field(0, ge=0, validation_alias="LOCAL_RANK")
    """This process among those of its host: the number of its GPU."""
    world_size: int = Field(1, ge=1, validation_alias="WORLD_SIZE")
    """Trainer processes of the run."""
