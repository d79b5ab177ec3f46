"""Settings of the controller process."""

import os
import socket
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.doors import References
from services.common.errors import InvalidArgumentError
from services.common.launchers import LAUNCHERS
from services.common.runspec.base import NameIn
from services.common.security.confinement import CodePolicy
from services.common.security.tls import Peer
from services.common.settings import KeySettings, SpecSettings, is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a project."""

    max_active_runs: int
    max_queued_runs: int
    max_gpus: int = 0
    """Max GPUs of its active runs, 0 means unlimited; a worker on a host without GPUs counts as if
    it had them."""
    max_transferqueue_bytes: int = 0
    """Max sum of ``transferqueue.quota_bytes`` over its active runs, 0 means unlimited."""
    max_checkpoint_bytes: int = 0
    """Size of the checkpoints of its runs at which no further run starts, 0 means unlimited."""
    max_requests_per_second: int = 0
    """Max requests to the API per second, 0 means unlimited."""
    max_event_streams: int = 0
    """Max open streams of events and logs, 0 means unlimited."""


DATABASE_FILE = "slipstream.db"
"""Name of the SQLite database file in the state directory."""
EXTENSIONS: Final = References("controller_extensions")
"""Asynchronous context managers that take the settings and the run manager and serve beside them, by the
names in ``extensions``."""
FLEET_FORMATS: Final = References("fleet_formats")
"""Functions of the fleets' file that return ``Fleets``, by the value of ``fleets_format``."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class ControllerSettings(KeySettings, SpecSettings):
    """Settings of the controller process, read from ``SLIPSTREAM_CONTROLLER_*``."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_CONTROLLER_")
    peer: ClassVar[Peer] = "controller"

    rest_bind: str = "127.0.0.1:0"
    """``host:port`` of the REST API; port 0 takes a free one."""
    transferqueue_address: str
    """``host:port`` of the transferqueue's gRPC server, as workers reach it."""
    state_directory: Path
    """Folder of the database and of each run's logs and checkpoints."""
    launcher: Annotated[str, NameIn(LAUNCHERS)] = "process"
    """Launcher of a run's workers: ``process`` starts processes of this host, ``kubernetes`` pods; ``none``
    if another system starts them; or the launcher of an extra or an installed package."""
    namespace: str = ""
    """Namespace of worker pods; only with the Kubernetes launcher."""
    workers_service: str = ""
    """Headless service of the worker pods, in their namespace; it owns the pods. Only with the
    Kubernetes launcher."""
    worker_templates: Path = Path("/etc/slipstream/workers")
    """Folder of the pod templates that the chart wrote; only with the Kubernetes launcher."""
    network_policies: bool = False
    """True to give each run a NetworkPolicy that lets its workers reach each other in a namespace
    whose other policies refuse all traffic; only with the Kubernetes launcher."""
    rollout_scales: bool = False
    """True to give each run a RolloutScale for autoscalers; only with the Kubernetes launcher."""
    watch_nodes: bool = False
    """True to move workers away from nodes that are cordoned or have one of ``drain_taints``; needs the
    right to watch nodes. Only with the Kubernetes launcher."""
    drain_taints: tuple[str, ...] = ()
    """Keys of taints that announce the end of a node; only with ``watch_nodes``."""
    transferqueue_namespace: str = ""
    """Namespace of the transferqueue's pods, which leave drained nodes after runs have saved checkpoints;
    empty to leave them alone. Only with ``watch_nodes``."""
    transferqueue_selector: str = ""
    """Label selector of the transferqueue's pods; only with ``watch_nodes``."""
    rlrun_namespaces: tuple[str, ...] = ()
    """Namespaces whose RLRun objects are runs of the project of the same name, for one installation
    each; only with the Kubernetes launcher."""
    metric_targets: Path | None = None
    """File in which the launcher lists, for Prometheus (``file_sd_configs``), the metrics endpoints of this
    host's workers; without it the workers serve no metrics. Only with the process launcher."""
    pending_timeout_s: float = Field(600.0, gt=0)
    """Time in seconds after which a worker pod that cannot start fails its run; only with the
    Kubernetes launcher."""
    fleets_file: Path | None = None
    """JSON file with the fleets of engine servers that runs may name: ``{"NAME": {"addresses": [...],
    "secret": "NAME OF THE TOKEN'S SECRET", "token_file": "PATH"}}``; read at each use."""
    fleets_format: Annotated[str, NameIn(FLEET_FORMATS)] = "json"
    """Format of ``fleets_file``: ``json``, or that of an installed package."""
    extensions: tuple[Annotated[str, NameIn(EXTENSIONS)], ...] = ()
    """Extensions of installed packages that serve next to the API. ``rlruns`` is one; ``rlrun_namespaces``
    starts it."""
    heartbeat_interval_s: float = Field(1.0, gt=0)
    """Min seconds between heartbeats of a worker."""
    max_heartbeats_per_s: float = Field(250.0, gt=0)
    """Max heartbeats per second of all workers together. With many workers each sends fewer, but at
    least four within the time-out."""
    heartbeat_timeout_s: float = Field(30.0, gt=0)
    """Time in seconds after which a silent worker counts as lost."""

    database_url: str = ""
    """SQLAlchemy URL of a PostgreSQL database; empty for an SQLite file in the state directory."""
    holder: str = Field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """Name of this controller among several; a controller of the same name takes its own lease back
    at once."""
    peer_host: str = ""
    """Address under which other controllers of the same database reach this one. With it, a controller
    that waits to lead forwards connections of its REST and gRPC ports to the leader; without it, it
    opens no port. Only with ``database_url``."""
    lease_ttl_s: float = Field(15.0, gt=0)
    """Time in seconds after which a leader that did not renew its lease is replaced."""
    leave_runs: bool = False
    """True to let runs continue without a controller when this one shuts down; otherwise they are
    paused and their workers stopped."""
    max_active_runs: int = Field(16, ge=1)
    """Max runs of a project that train at once, unless the project has its own quota."""
    max_queued_runs: int = Field(1000, ge=1)
    """Max queued runs of a project, unless the project has its own quota."""
    max_gpus: int = Field(0, ge=0)
    """Max GPUs of a project's active runs together, unless the project has its own quota; 0 means
    unlimited. A worker on a host without GPUs counts as if it had them."""
    max_transferqueue_bytes: int = Field(0, ge=0)
    """Max sum of ``transferqueue.quota_bytes`` over a project's active runs, unless the project has
    its own quota; 0 means unlimited."""
    max_checkpoint_bytes: int = Field(0, ge=0)
    """Size of the checkpoints of a project's runs at which no further run of it starts, unless the
    project has its own quota; 0 means unlimited."""
    max_requests_per_second: int = Field(100, ge=0)
    """Requests of a project per second that each controller answers, with bursts of twice as many,
    unless the project has its own quota; 0 means unlimited."""
    max_event_streams: int = Field(256, ge=0)
    """Max streams of events and logs that a project may have open at each controller, unless the
    project has its own quota; 0 means unlimited."""
    grpc_reflection: bool = False
    """True to let clients such as grpcurl ask the gRPC server for the methods of the run API."""
    admin_token_file: Path | None = None
    """File with an API token of an admin of the project ``default``; with it, the API requires tokens."""

    oidc_issuer: str = ""
    """URL of an OpenID Connect provider whose tokens the API accepts; empty for none."""
    oidc_audience: str = "slipstream"
    """Audience that the provider's tokens must name."""
    oidc_roles_claim: str = "slipstream_roles"
    """Claim with a list of ``project:role``; the role is viewer, operator or admin. Dots descend
    into objects, as in ``realm_access.roles``."""
    oidc_name_claim: str = "sub"
    """Claim with the name of the user."""
    rest_hosts: tuple[str, ...] = ()
    """Host names, without ports, under which browsers reach the REST API. Default: the loopback
    names if it binds loopback, otherwise any."""
    rest_connections_per_peer: int = Field(1024, ge=1)
    """Max open connections to the REST API from one address, and at most half of this process's
    descriptors. All clients of a gateway share its address."""
    rest_tls_certificate: Path | None = None
    """PEM file with the certificate chain of the REST API; without it the API is served as plain
    HTTP. A renewed file is reloaded."""
    rest_tls_key: Path | None = None
    """PEM file with that certificate's key."""

    @property
    def allowance(self) -> CodePolicy:
        """Policy for what specifications may name; runs may not write next to the controller's files."""
        # Each pod has its own volume at the same path.
        is_shared = LAUNCHERS[self.launcher].shares_files
        unwritable = (*self.unwritable_roots, *((self.state_directory,) if is_shared else ()))
        return replace(super().allowance, unwritable=unwritable)

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.state_directory / DATABASE_FILE}"

    def limits(self) -> Limits:
        """Returns the limits of projects without their own quota."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def hosts(self) -> tuple[str, ...]:
        """Returns the host names under which the REST API is reached; empty allows any."""
        return self.rest_hosts or (LOOPBACK if is_loopback(self.rest_bind) else ())

    def check_users(self) -> None:
        """Checks that at least one user can use the API.

        Raises:
            InvalidArgumentError: If neither a token file nor an OpenID Connect provider is set.
        """
        if not (self.admin_token_file or self.oidc_issuer):
            raise InvalidArgumentError(
                "no user could use the API: set admin_token_file or oidc_issuer; 'slipstream up' creates "
                "a token itself"
            )
