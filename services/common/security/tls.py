"""Certificates of a process for mutual TLS, and their renewal."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import grpc

from services.common.errors import InvalidArgumentError

Peer = Literal["controller", "transferqueue", "worker"]
"""Role of a peer; its certificate must have its :func:`peer_name`."""

ANY_WORKER = "*.worker.slipstream"
"""Name in a certificate for the workers of every run, if certificates are issued externally."""


def peer_name(peer: Peer, run_id: str = "") -> str:
    """Returns the DNS name in a certificate: role of the peer and, for a worker, its run."""
    label = f"{run_id.replace('_', '-')}." if run_id and peer == "worker" else ""
    return f"{label}{peer}.slipstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Certificate with its key, and the authority that verifies others; all in PEM."""

    chain: bytes
    """The certificate and the intermediate ones up to the authority."""
    key: bytes = field(repr=False)
    authority: bytes
    """Authority that signs the certificates of all peers."""
    renew_at: float = math.inf
    """Time of its renewal, in seconds since the epoch."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials of a channel, whose connections all present this certificate."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.chain)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Returns the configuration of a server that requires client certificates."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.chain)], root_certificates=self.authority
        )


class Tls(Protocol):
    """Source of a process's certificate."""

    def current(self) -> Certificate:
        """Returns the current certificate: the same object until there is a new one."""


class TlsFiles:
    """Certificate in files, which are reloaded when they change.

    Args:
        certificate: The certificate and the intermediate ones up to the authority.
    """

    def __init__(self, *, certificate: Path, key: Path, authority: Path) -> None:
        self._files = (certificate, key, authority)
        self._stamp: tuple[int, ...] = ()
        self._current: Certificate | None = None

    def current(self) -> Certificate:
        """Returns the certificate in the files; the previous one while they are being written.

        Raises:
            InvalidArgumentError: If they cannot be read the first time.
        """
        try:
            stamp = self._times()
            if self._current is None or stamp != self._stamp:
                chain, key, authority = (file.read_bytes() for file in self._files)
                # If they changed during the read they may not match; the next call reads them
                # again.
                if self._current is None or self._times() == stamp:
                    self._current = Certificate(chain=chain, key=key, authority=authority)
                    self._stamp = stamp
        except OSError as error:
            if self._current is None:
                raise InvalidArgumentError(
                    f"cannot read {error.filename}: {error.strerror}", file=error.filename
                ) from error
        return self._current

    def _times(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Returns credentials of a server that requires client certificates and uses renewed certificates."""
    current_tls = tls.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Returns the new configuration at a handshake; None keeps the current one."""
        nonlocal current_tls
        before, current_tls = current_tls, tls.current()
        return None if current_tls is before else current_tls.server_configuration()

    return grpc.dynamic_ssl_server_credentials(
        current_tls.server_configuration(),
        renewed,  # type: ignore[arg-type]  # its stub lacks that None keeps the certificate
        require_client_authentication=True,
    )
