"""What a process shows to its peers over mutual TLS, and takes up again when it is renewed."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import grpc

from services.common.errors import InvalidArgumentError

Peer = Literal["controller", "transferqueue", "worker"]
"""Who is called; its certificate must hold its :func:`peer_name`."""

ANY_WORKER = "*.worker.slipstream"
"""Name in a certificate that serves the workers of every run, where somebody else makes certificates."""


def peer_name(peer: Peer, run_id: str = "") -> str:
    """The DNS name that a certificate holds: it says what the peer is, and of a worker, of which run.

    Args:
        peer: What it is.
        run_id: The run of a worker.
    """
    label = f"{run_id.replace('_', '-')}." if run_id and peer == "worker" else ""
    return f"{label}{peer}.slipstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate with its key, and by what others are known; all in PEM."""

    chain: bytes
    """The certificate, and those that lead from it to the authority."""
    key: bytes = field(repr=False)
    authority: bytes
    """Who signs everybody's."""
    renew_at: float = math.inf
    """When another is due, in seconds since the epoch."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel, whose connections all show this certificate."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.chain)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """For a server that asks its clients for certificates."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.chain)], root_certificates=self.authority
        )


class Tls(Protocol):
    """Where the certificate of a process comes from."""

    def current(self) -> Certificate:
        """What to show now: the same object until there is a new one."""


class TlsFiles:
    """A certificate in files, which are read again when they change.

    Args:
        certificate: Certificate and those that lead from it to the authority.
        key: Its key.
        authority: Who signs everybody's.
    """

    def __init__(self, *, certificate: Path, key: Path, authority: Path) -> None:
        self._files = (certificate, key, authority)
        self._stamp: tuple[int, ...] = ()
        self._current: Certificate | None = None

    def current(self) -> Certificate:
        """What the files hold; what they held, while they are being written.

        Raises:
            InvalidArgumentError: If they cannot be read, the first time.
        """
        try:
            stamp = self._times()
            if self._current is None or stamp != self._stamp:
                chain, key, authority = (file.read_bytes() for file in self._files)
                # Or they may not belong together, and are read again the next time.
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
    """For a server that asks its clients for certificates, and shows a renewed one from then on."""
    shown = tls.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; None keeps what there is."""
        nonlocal shown
        before, shown = shown, tls.current()
        return None if shown is before else shown.server_configuration()

    return grpc.dynamic_ssl_server_credentials(
        shown.server_configuration(),
        renewed,  # type: ignore[arg-type]  # its stub lacks that None keeps the certificate
        require_client_authentication=True,
    )
