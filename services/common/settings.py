"""Where a process lives: the settings that every service has."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Base of the settings of each service; subclasses set their own ``env_prefix``."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    bind: str = "127.0.0.1:0"
    """``host:port`` of the gRPC server; port 0 takes a free one."""
    advertise_host: str = "127.0.0.1"
    """Host name or address under which other services reach this one."""
    ready_file: Path | None = None
    """File that gets one line of JSON with the bound addresses once the service is up."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of ``/metrics``; 0 serves none."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Form of a log line."""
    stop_on_stdin_eof: bool = False
    """Whether to stop when standard input ends, that is, when the parent process is gone."""


class WorkerSettings(ServiceSettings):
    """Settings of the workers of a run: trainer and rollout."""

    controller_address: str
    """``host:port`` of the controller's gRPC server."""
    run_id: str
    """The run that this worker belongs to."""
    worker_id: str
    """Name of this worker inside its run, for example ``rollout-1``; stable over restarts."""
    controller_timeout_s: float = Field(120.0, gt=0)
    """A worker that cannot reach its controller for this long ends itself."""
