"""Settings of the command line."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class CliSettings(BaseSettings):
    """What the ``slipstream`` command reads from the environment."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_", extra="ignore")

    token: str = ""
    """API token, where the controller asks for one."""
    url: str = ""
    """REST address of a controller. Default: the one that ``slipstream up`` started here."""


class MachineSettings(BaseSettings):
    """What the environment says of this machine."""

    visible_gpus: str | None = Field(None, validation_alias="CUDA_VISIBLE_DEVICES")
    """GPUs that may be used; None is all of them."""
    queue_bytes: int = Field(1 << 30, validation_alias="SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES")
    """Memory of the transferqueue that the command line starts here."""
    queue_spill_bytes: int = Field(0, validation_alias="SLIPSTREAM_TRANSFERQUEUE_SPILL_BYTES")
    """Room on disk that it has besides."""
