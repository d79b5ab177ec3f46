"""Settings of the controller process."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings


class ControllerSettings(ServiceSettings):
    """Where the controller lives."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_CONTROLLER_")

    rest_bind: str = "127.0.0.1:0"
    """``host:port`` of the REST API; port 0 takes a free one."""
    transferqueue_address: str
    """``host:port`` of the transferqueue's gRPC server, as workers reach it."""
    state_directory: Path
    """Folder of the database and of each run's logs and checkpoints."""
    launcher: Literal["process", "kubernetes", "none"] = "process"
    """Who starts a run's workers: this host, the Kubernetes API, or somebody else."""
    namespace: str = ""
    """Namespace of worker pods; only with the Kubernetes launcher."""
    deployment: str = ""
    """This controller's Deployment, which owns the worker pods; only with the Kubernetes launcher."""
    worker_templates: Path = Path("/etc/slipstream/workers")
    """Folder of the pod templates that the chart wrote; only with the Kubernetes launcher."""
    pending_timeout_s: float = Field(600.0, gt=0)
    """A worker pod that cannot start for this long fails its run; only with the Kubernetes launcher."""
    heartbeat_interval_s: float = Field(1.0, gt=0)
    """Seconds between heartbeats of a worker."""
    heartbeat_timeout_s: float = Field(30.0, gt=0)
    """A worker that is silent for this long counts as lost."""
