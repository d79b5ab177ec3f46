"""Where a transferqueue process lives."""

import tempfile
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.security.tls import Peer
from services.common.settings import KeySettings, is_loopback


class TransferQueueSettings(KeySettings):
    """Settings from ``SLIPSTREAM_TRANSFERQUEUE_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRANSFERQUEUE_")
    peer: ClassVar[Peer] = "transferqueue"

    data_bind: str = "127.0.0.1:0"
    """``host:port`` of the ZeroMQ socket; port 0 takes a free one."""
    index_address: str = ""
    """``host:port`` of the process that holds the index; empty if it is this one. A process with an
    index address is a storage shard only and serves no gRPC."""
    use_curve: bool = False
    """Whether the data socket is encrypted and open to admitted clients only. Required unless it is
    bound to a loopback address."""
    shard_id: str = "shard-0"
    """Name of this process's storage shard; stable over restarts."""
    capacity_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory for samples. It is taken at start, so that puts never wait for fresh pages."""
    backend: Literal["memory", "mooncake"] = "memory"
    """Where the bytes are: in this process, or in Mooncake Store, to which this process lends its
    capacity."""
    mooncake_master: str = "127.0.0.1:50051"
    """``host:port`` of ``mooncake_master``."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of Mooncake Store."""
    mooncake_replicas: int = Field(1, ge=1)
    """Copies of each object in Mooncake Store; at most one per shard."""
    spill_bytes: int = Field(0, ge=0)
    """Room on disk for the oldest samples when the memory is full; 0 makes producers wait instead."""
    spill_folder: Path = Path(tempfile.gettempdir())
    """Folder for that room."""
    snapshot_folder: Path = Path(tempfile.gettempdir()) / "slipstream-snapshots"
    """Folder of the snapshots; on storage that outlives the process."""
    kept_folder: Path = Path(tempfile.gettempdir()) / "slipstream-kept"
    """Folder of the samples that are kept to be read; on storage that outlives the process."""
    kept_bytes: int = Field(8 << 30, ge=1 << 20)
    """Room for them. Those of runs that are over go first, the oldest first."""
    arena_folder: Path | None = Path(tempfile.gettempdir())
    """Folder of the unix socket through which processes of this host get at the memory; in a
    cluster a folder of the node that the pods mount. None serves the network only."""

    @model_validator(mode="after")
    def _plain_only_on_loopback(self) -> "TransferQueueSettings":
        if not self.use_curve and not is_loopback(self.data_bind):
            raise ValueError(
                f"data_bind {self.data_bind!r} is open to other hosts; set use_curve, or bind to "
                "127.0.0.1"
            )
        return self
