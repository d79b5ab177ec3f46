"""What a process shows to its peers and by what it knows them: TLS files and tokens.

A process takes its identity on once, in its ``main``; servers and channels opened inside that block use it.
A process without one trusts whoever reaches it, which the settings allow on loopback only.
"""

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from services.common.errors import InvalidArgumentError, UnauthenticatedError
from services.common.run_tokens import SERVICES, bearer_of, issue_token

Peer = Literal["controller", "transferqueue", "worker"]
"""Who is called; its certificate must hold the DNS name ``<peer>.slipstream``."""

MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Certificate and key of this process, and the authority that signs everybody's."""

    certificate: Path
    key: Path
    authority: Path

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that asks its clients for certificates; reads the files again when they change."""
        loaded = _Reloader(self)
        return grpc.dynamic_ssl_server_credentials(
            loaded.read(),
            loaded.read_if_changed,  # type: ignore[arg-type]  # its stub lacks that None keeps the files
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel; the files are read now."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.authority),
            private_key=_read(self.key),
            certificate_chain=_read(self.certificate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is."""

    tls: TlsFiles | None = None
    """Files for mutual TLS; None talks in plain text."""
    key: bytes = field(default=b"", repr=False)
    """Signs and checks the tokens of all runs; only services have it."""
    run_token: str = field(default="", repr=False)
    """Token of the one run that a worker belongs to."""

    @property
    def is_known(self) -> bool:
        """Whether this process shows and asks for tokens."""
        return bool(self.key or self.run_token)

    def token_for(self, run_id: str = "") -> str:
        """The token to show to a worker of a run, or with no run to a service; empty without identity."""
        if self.key:
            return issue_token(self.key, run_id or SERVICES)
        return self.run_token

    def bearer(self, authorization: str) -> str:
        """Whose token an ``authorization`` header holds: a run's id, or ``services``.

        Raises:
            UnauthenticatedError: If it holds none that this process knows.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            if self.key and (found := bearer_of(self.key, token)) is not None:
                return found
            if self.run_token and hmac.compare_digest(token.encode(), self.run_token.encode()):
                return SERVICES
        raise UnauthenticatedError(
            "no token that is known here came; workers get theirs from the controller that starts them, in "
            "RUN_TOKEN, and services share service_key_file"
        )


_identity: ContextVar[Identity] = ContextVar("identity", default=Identity())  # noqa: B039 -- frozen


def current_identity() -> Identity:
    """The identity of this process."""
    return _identity.get()


@contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Take an identity on until the block ends."""
    token = _identity.set(identity)
    try:
        yield
    finally:
        _identity.reset(token)


def read_key(file: Path) -> bytes:
    """The key of the installation.

    Raises:
        InvalidArgumentError: If the file cannot be read or the key is too short to be secret.
    """
    key = _read(file).strip()
    if len(key) < MIN_KEY_BYTES:
        raise InvalidArgumentError(
            f"{file} holds {len(key)} bytes; a key needs {MIN_KEY_BYTES} random ones, for example from "
            "'openssl rand -hex 32'"
        )
    return key


class _Reloader:
    """Reads certificate files, and again when one of them was written."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._times()

    def read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        return grpc.ssl_server_certificate_configuration(
            [(_read(files.key), _read(files.certificate))],
            root_certificates=_read(files.authority),
        )

    def read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; None keeps what there is."""
        times = self._times()
        if times == self._stamp:
            return None
        self._stamp = times
        return self.read()

    def _times(self) -> tuple[int, ...]:
        files = (self._files.certificate, self._files.key, self._files.authority)
        return tuple(file.stat().st_mtime_ns for file in files)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {error.strerror}", file=file) from error
