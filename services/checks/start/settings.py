"""Properties of this machine from the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings

from services.controller.launch.gpus import host_gpus


class MachineSettings(BaseSettings):
    """Properties of this machine from the environment."""

    visible_gpus: str | None = Field(None, validation_alias="CUDA_VISIBLE_DEVICES")
    """GPUs that may be used; None means all."""
    queue_bytes: int = Field(1 << 30, validation_alias="SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES")
    """Memory of the transferqueue that the command line starts on this machine."""
    queue_spill_bytes: int = Field(0, validation_alias="SLIPSTREAM_TRANSFERQUEUE_SPILL_BYTES")
    """Additional disk space of that transferqueue."""


def gpu_names() -> tuple[str, ...]:
    """Returns this machine's GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    return host_gpus(MachineSettings().visible_gpus)


def num_gpus() -> int:
    """Returns the number of this machine's GPUs that may be used."""
    return len(gpu_names())
