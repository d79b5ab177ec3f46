"""Where a transferqueue process lives."""

import tempfile
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings


class TransferQueueSettings(ServiceSettings):
    """Settings from ``SLIPSTREAM_TRANSFERQUEUE_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRANSFERQUEUE_")

    data_bind: str = "127.0.0.1:0"
    """``host:port`` of the ZeroMQ socket; port 0 takes a free one."""
    shard_id: str = "shard-0"
    """Name of this process's storage shard; stable over restarts."""
    capacity_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory for samples. It is taken at start, so that puts never wait for fresh pages."""
    arena_folder: Path | None = Path(tempfile.gettempdir())
    """Folder of the unix socket through which processes of this host get at the memory; in a
    cluster a folder of the node that the pods mount. None serves the network only."""
