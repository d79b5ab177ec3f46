"""Settings that every service has, read from environment variables."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.doors import DoorError, References
from services.common.errors import InvalidArgumentError
from services.common.runspec.base import NameIn
from services.common.security.confinement import CodePolicy
from services.common.security.credentials import Identity, read_key
from services.common.security.tls import Peer, TlsFiles, peer_name
from services.common.stores import OBJECT_CACHE

_LOOPBACK = ("127.", "localhost:", "[::1]:")

TRACE_EXPORTERS: Final = References("trace_exporters")
"""Exporters of spans by the value of ``trace_exporter``: context managers that take the endpoint, ``ratio``
and ``facts``."""


def set_defaults(values: Mapping[str, str]) -> None:
    """Sets environment variables that other packages read at start; keeps values that are already set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)  # noqa: TID251 -- this is the settings module


def is_loopback(bind: str) -> bool:
    """Returns True if only this host can reach ``host:port``."""
    return bind.startswith(_LOOPBACK)


class ServiceSettings(BaseSettings):
    """Base class of the settings of each service; subclasses set their own ``env_prefix``."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )

    bind: str = "127.0.0.1:0"
    """``host:port`` of the gRPC server; port 0 chooses a free one."""
    advertise_host: str = "127.0.0.1"
    """Host name or address under which other services reach this one."""
    ready_file: Path | None = None
    """File that receives one line of JSON with the bound addresses after the service has started."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of ``/metrics`` on the host of ``bind``; 0 serves none."""
    metrics_token_file: Path | None = None
    """File with the bearer token that scrapes must send; without it everyone who reaches the port can read
    the metrics. Those of the controller and the transferqueue name the runs of all projects.
    """
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Min. level of logged records."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""
    trace_endpoint: str = Field("", validation_alias="SLIPSTREAM_TRACE_ENDPOINT")
    """``http://host:4317`` of an OpenTelemetry collector that receives spans; empty sends none. The
    variable is the same for all services and so does not have their prefix.
    """
    trace_exporter: Annotated[str, NameIn(TRACE_EXPORTERS)] = Field(
        "otlp", validation_alias="SLIPSTREAM_TRACE_EXPORTER"
    )
    """Exporter of spans: ``otlp``, or that of an installed package."""
    trace_ratio: float = Field(0.01, ge=0, le=1, validation_alias="SLIPSTREAM_TRACE_RATIO")
    """Fraction of the sample groups whose spans are sent; spans of steps and weight syncs are always sent."""
    stop_on_stdin_eof: bool = False
    """Stop when standard input ends, that is, when the parent process has ended."""
    tls_certificate: Path | None = None
    """PEM file with the certificate that this process presents to services and workers, for the DNS name
    ``controller.slipstream``, ``transferqueue.slipstream``, or of a worker ``RUN.worker.slipstream``, with
    ``-`` for ``_`` in the run's id, or ``*.worker.slipstream``. It is reloaded when it changes.
    """
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    tls_authority: Path | None = None
    """PEM file with the authority that signed the certificates of all services and workers."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(files) and not all(files):
            raise ValueError(
                "expected all of tls_certificate, tls_key and tls_authority or none; set all three, or "
                "remove them"
            )
        return self

    def serving_metrics(self) -> AbstractAsyncContextManager[int]:
        """Serves ``/metrics`` until the block ends, if ``metrics_port`` is set."""
        # The command line reads settings, too, and needs no HTTP server.
        from services.common.http.server import serve_metrics

        return serve_metrics(self.bind, self.metrics_port, token_file=self.metrics_token_file)

    @contextmanager
    def tracing(self, service: str, **facts: str) -> Iterator[None]:
        """Sends this process's spans to the collector, if there is one, until the block ends.

        Raises:
            InvalidArgumentError: If the exporter cannot be loaded.
        """
        if not self.trace_endpoint:
            yield
            return
        try:
            exporting = TRACE_EXPORTERS.load(self.trace_exporter)
        except DoorError as error:
            cause = error.__cause__
            if self.trace_exporter == "otlp" and isinstance(cause, ModuleNotFoundError):
                raise InvalidArgumentError(
                    f"trace_endpoint needs the package {cause.name}; pip install 'slipstream[tracing]'"
                ) from error
            raise InvalidArgumentError(f"trace_exporter: {error}") from error
        facts = {"service.name": f"slipstream-{service}", **facts}
        with exporting(self.trace_endpoint, ratio=self.trace_ratio, facts=facts):
            yield

    @property
    def tls(self) -> TlsFiles | None:
        """Files for mutual TLS; None if they are not set."""
        if self.tls_certificate is None or self.tls_key is None or self.tls_authority is None:
            return None
        return TlsFiles(
            certificate=self.tls_certificate, key=self.tls_key, authority=self.tls_authority
        )


class KeySettings(ServiceSettings):
    """Settings of the services that act for every run: controller and transferqueue."""

    service_key_file: Path | None = None
    """File with the secret by which the services authenticate each other and sign the tokens of
    runs: the same for all of them, 32 random bytes or more. Required unless gRPC is bound to a
    loopback address.
    """
    tls_issuer: Path | None = None
    """Folder with ``tls.crt`` and ``tls.key`` of an authority, and ``ca.crt``, with which all peers are
    verified. With it, services issue their own certificates, valid for three days, and the controller those
    of its runs, in place of ``tls_certificate``, ``tls_key`` and ``tls_authority``.
    """

    peer: ClassVar[Peer]
    """Role of this service in its certificate."""

    @model_validator(mode="after")
    def _certificate_has_one_source(self) -> Self:
        if self.tls_issuer is not None and self.tls_certificate is not None:
            raise ValueError("tls_issuer and tls_certificate exclude each other; remove one")
        return self

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> Self:
        if self.service_key_file is None and not is_loopback(self.bind):
            raise ValueError(
                f"bind {self.bind!r} accepts other hosts; set service_key_file, or bind to 127.0.0.1"
            )
        return self

    def identity(self) -> Identity:
        """Returns the identity of this process.

        Raises:
            InvalidArgumentError: If the key or the issuer cannot be read.
        """
        key = read_key(self.service_key_file) if self.service_key_file else b""
        if self.tls_issuer is None:
            return Identity(tls=self.tls, key=key)
        # Only services with an issuer need its dependencies.
        from services.common.security.issuer import IssuedTls, Issuer

        issuer = Issuer(self.tls_issuer)
        issued = IssuedTls(issuer, peer_name(self.peer))
        return Identity(tls=issued, issue=issuer.issue, key=key)


class SpecSettings(ServiceSettings):
    """Settings of the processes that read specifications: the controller and workers."""

    allowed_roots: tuple[Path, ...] = ()
    """Folders, as workers see them, in which a specification may name files; empty allows all."""
    allowed_urls: tuple[str, ...] = ()
    """Begins of URLs in object stores, such as ``s3://bucket/team``, below which a specification may name
    objects; only with ``allowed_roots``."""
    code_roots: tuple[Path, ...] = ()
    """Folders with Python code that a specification may name; only with ``allowed_roots``."""
    allowed_commands: tuple[tuple[str, ...], ...] = ()
    """Commands that a specification may start, such as those of MCP servers, each with all its
    arguments; only with ``allowed_roots``.
    """

    unwritable_roots: tuple[Path, ...] = ()
    """Further folders, besides ``code_roots``, to which runs may not write by paths of a specification; only
    with ``allowed_roots``."""
    reward_hosts: tuple[str, ...] = ()
    """Hosts, in lower case, of reward services and agents that may have private addresses. With
    ``allowed_roots``, the only hosts that arguments may name.

    Public hosts of reward services and agents need no entry.
    """

    @property
    def allowance(self) -> CodePolicy:
        """Policy for the files, code, commands and hosts that specifications may name."""
        return CodePolicy(
            roots=self.allowed_roots,
            urls=self.allowed_urls,
            code_roots=self.code_roots,
            commands=self.allowed_commands,
            hosts=self.reward_hosts,
            unwritable=self.unwritable_roots,
        )


class WorkerSettings(SpecSettings):
    """Settings of the workers of a run: trainer and rollout."""

    controller_address: str
    """``host:port`` of the controller's gRPC server."""
    run_id: str
    """Id of the run that this worker belongs to."""
    worker_id: str
    """Name of this worker inside its run, for example ``rollout-1``; stable over restarts."""
    controller_timeout_s: float = Field(120.0, gt=0)
    """Seconds without a reachable controller after which the worker exits."""
    run_token: SecretStr = SecretStr("")
    """Token of the run; the controller gives it to the workers that it starts. Required unless gRPC
    is bound to a loopback address.
    """

    object_cache: Path = OBJECT_CACHE
    """Folder of this host's copies of models, data and checkpoints in object stores."""
    secrets_directory: Path | None = None
    """Folder with a file per secret, for specifications that contain ``{"secret": "NAME"}``."""

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> Self:
        if not self.run_token.get_secret_value() and not is_loopback(self.bind):
            raise ValueError(
                f"bind {self.bind!r} accepts other hosts; set run_token, or bind to 127.0.0.1"
            )
        return self

    def identity(self) -> Identity:
        return Identity(tls=self.tls, run_token=self.run_token.get_secret_value())
