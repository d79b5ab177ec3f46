"""Settings of a transferqueue process."""

import tempfile
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.security.tls import Peer
from services.common.settings import KeySettings, is_loopback


class TransferQueueSettings(KeySettings):
    """Settings of a transferqueue process, read from ``SLIPSTREAM_TRANSFERQUEUE_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRANSFERQUEUE_")
    peer: ClassVar[Peer] = "transferqueue"

    data_bind: str = "127.0.0.1:0"
    """``host:port`` of the ZeroMQ socket; port 0 chooses a free one."""
    index_address: str = ""
    """``host:port`` of the process that holds the index; empty if this process holds it. A process
    with an index address is only a storage shard and serves no gRPC.
    """
    use_curve: bool = False
    """Encrypts the data socket with CURVE and accepts only admitted clients. Required unless the
    socket is bound to a loopback address.
    """
    shard_id: str = "shard-0"
    """Name of this process's storage shard; stable over restarts."""
    capacity_bytes: int = Field(1 << 30, ge=1 << 20)
    """Size of the memory for samples."""
    allocate_at_start: bool = True
    """Allocates the memory at the start, so that no put waits for page faults; otherwise as it is used."""
    spill_bytes: int = Field(0, ge=0)
    """Disk space for the oldest samples when the memory is full; 0 makes producers wait instead."""
    spill_folder: Path = Path(tempfile.gettempdir())
    """Folder of the spill file."""
    snapshot_folder: Path = Path(tempfile.gettempdir()) / "slipstream-snapshots"
    """Folder of the snapshots; must be on storage that outlives the process."""
    sample_folder: Path = Path(tempfile.gettempdir()) / "slipstream-samples"
    """Folder of the sample records; must be on storage that outlives the process."""
    sample_bytes: int = Field(8 << 30, ge=1 << 20)
    """Max bytes of all sample records. Records of ended runs are deleted first, the oldest first."""
    arena_folder: Path | None = Path(tempfile.gettempdir())
    """Folder of the Unix socket through which processes of this host map the memory; in a cluster,
    a folder of the node that the pods mount. None serves the network only.
    """

    @model_validator(mode="after")
    def _plain_only_on_loopback(self) -> "TransferQueueSettings":
        if not self.use_curve and not is_loopback(self.data_bind):
            raise ValueError(
                f"data_bind {self.data_bind!r} accepts other hosts; set use_curve, or bind to "
                "127.0.0.1"
            )
        return self
