"""Settings of the controller process."""

import os
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.errors import InvalidArgumentError
from services.common.security.tls import Peer
from services.common.settings import KeySettings, SpecSettings, is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a project may use."""

    max_active_runs: int
    max_queued_runs: int
    max_gpus: int = 0
    """GPUs of its active runs, 0 for no bound; a worker on a host without GPUs counts as if it had them."""
    max_transferqueue_bytes: int = 0
    """Sum of ``transferqueue.quota_bytes`` of its active runs, 0 for no bound."""
    max_checkpoint_bytes: int = 0
    """Size of the checkpoints of its runs above which none starts, 0 for no bound."""
    max_requests_per_second: int = 0
    """Requests to the API, 0 for no bound."""
    max_event_streams: int = 0
    """Streams of events and logs that are open at once, 0 for no bound."""


DATABASE_FILE = "slipstream.db"
"""Name of the SQLite database in the state directory."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class ControllerSettings(KeySettings, SpecSettings):
    """Where the controller lives."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_CONTROLLER_")
    peer: ClassVar[Peer] = "controller"

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
    workers_service: str = ""
    """Headless service of the worker pods, in their namespace, which owns them; only with the Kubernetes
    launcher."""
    worker_templates: Path = Path("/etc/slipstream/workers")
    """Folder of the pod templates that the chart wrote; only with the Kubernetes launcher."""
    network_policies: bool = False
    """Whether each run gets a NetworkPolicy that lets its workers reach each other, where others refuse all;
    only with the Kubernetes launcher."""
    rollout_scales: bool = False
    """Whether each run gets a RolloutScale for autoscalers; only with the Kubernetes launcher."""
    metric_targets: Path | None = None
    """File that tells Prometheus, by ``file_sd_configs``, where the metrics of this host's workers are;
    without it they have none. Only with the process launcher."""
    pending_timeout_s: float = Field(600.0, gt=0)
    """A worker pod that cannot start for this long fails its run; only with the Kubernetes launcher."""
    heartbeat_interval_s: float = Field(1.0, gt=0)
    """Seconds between heartbeats of a worker, at least."""
    max_heartbeats_per_s: float = Field(250.0, gt=0)
    """Heartbeats of all workers together: with many workers each sends fewer, but four within the timeout."""
    heartbeat_timeout_s: float = Field(30.0, gt=0)
    """A worker that is silent for this long counts as lost."""

    database_url: str = ""
    """SQLAlchemy's URL of a PostgreSQL database; empty for an SQLite file in the state directory."""
    holder: str = Field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """Names this controller among several; the same name takes its own lease back at once."""
    lease_ttl_s: float = Field(15.0, gt=0)
    """A leader that did not renew its lease for this long is replaced."""
    leave_runs: bool = False
    """Whether runs go on without a controller when this one is told to stop; otherwise they are cancelled."""
    max_active_runs: int = Field(16, ge=1)
    """Runs of a project that may train at once, unless it has a quota of its own."""
    max_queued_runs: int = Field(1000, ge=1)
    """Runs of a project that may wait, unless it has a quota of its own."""
    max_gpus: int = Field(0, ge=0)
    """GPUs that the active runs of a project may take together, unless it has a quota of its own; 0 for no
    bound. A worker on a host without GPUs counts as if it had them."""
    max_transferqueue_bytes: int = Field(0, ge=0)
    """Sum of ``transferqueue.quota_bytes`` of a project's active runs, unless it has a quota of its own; 0
    for no bound."""
    max_checkpoint_bytes: int = Field(0, ge=0)
    """Size of the checkpoints of a project's runs above which no further run of it starts, unless it has a
    quota of its own; 0 for no bound."""
    max_requests_per_second: int = Field(100, ge=0)
    """Requests of a project that each controller answers, twice as many at once, unless it has a quota of its
    own; 0 for no bound."""
    max_event_streams: int = Field(256, ge=0)
    """Streams of events and logs that a project may have open at each controller, unless it has a quota of
    its own; 0 for no bound."""
    grpc_reflection: bool = False
    """Whether clients such as grpcurl may ask the gRPC server what its run API offers."""
    admin_token_file: Path | None = None
    """File with an API token of an admin of the project ``default``; with it, the API asks for tokens."""

    oidc_issuer: str = ""
    """URL of an OpenID Connect provider whose tokens the API accepts; empty for none."""
    oidc_audience: str = "slipstream"
    """Audience that its tokens must name."""
    oidc_roles_claim: str = "slipstream_roles"
    """Claim with a list of ``project:role``, where the role is viewer, operator or admin. Dots go into
    objects, as in ``realm_access.roles``."""
    oidc_name_claim: str = "sub"
    """Claim that names the user."""
    rest_hosts: tuple[str, ...] = ()
    """Names that browsers reach the REST API by, without ports. Default: those of loopback if it binds that,
    otherwise any."""
    rest_connections_per_peer: int = Field(1024, ge=1)
    """Connections to the REST API that one address may have open, at most half of this process's descriptors;
    behind a gateway all have its address."""
    rest_tls_certificate: Path | None = None
    """PEM file with the certificate chain of the REST API; without it the API is served as plain HTTP. A new
    one is noticed."""
    rest_tls_key: Path | None = None
    """PEM file with that certificate's key."""

    @property
    def database(self) -> str:
        """SQLAlchemy's URL of the database."""
        return self.database_url or f"sqlite:///{self.state_directory / DATABASE_FILE}"

    def limits(self) -> Limits:
        """Limits of projects without a quota of their own."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names that the REST API is reached by; none allows any."""
        return self.rest_hosts or (LOOPBACK if is_loopback(self.rest_bind) else ())

    def check_users(self) -> None:
        """See that somebody may use the API.

        Raises:
            InvalidArgumentError: If nobody could.
        """
        if not (self.admin_token_file or self.oidc_issuer):
            raise InvalidArgumentError(
                "nobody could use the API: set admin_token_file or oidc_issuer; 'slipstream up' starts a "
                "controller with a token of its own"
            )
