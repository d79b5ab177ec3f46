"""Issues short-lived certificates: for the service itself, in memory, and for the workers of each run.

The issuer of an installation must be protected like its service key: only the services may have it.
"""

import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.errors import InvalidArgumentError
from services.common.host import Clock
from services.common.security.tls import Certificate, TlsFiles
from services.common.telemetry.logging import RareLog

logger = logging.getLogger(__name__)

LIFETIME = timedelta(days=3)
_AUTHORITY_LIFETIME = timedelta(days=3650)
# Tolerates clock differences between nodes.
_EARLIER = timedelta(minutes=5)
_failures = RareLog(logger)


class Issuer:
    """Signs certificates with an authority of the installation, which is reloaded when it changes.

    Args:
        folder: Folder with ``tls.crt`` and ``tls.key`` of the authority, and ``ca.crt``, with which
            all peers are verified: the same certificate, or one above it.
    """

    def __init__(self, folder: Path, *, clock: Clock = time) -> None:
        self._folder = folder
        self._clock = clock
        self._files = TlsFiles(
            certificate=folder / "tls.crt", key=folder / "tls.key", authority=folder / "ca.crt"
        )

    def issue(self, name: str) -> Certificate:
        """Issues a certificate for a DNS name, due for renewal after half of its lifetime.

        Raises:
            InvalidArgumentError: If the authority cannot be read, may not sign, or has expired.
        """
        authority = self._files.current()
        signer, signing_key = self._load(authority)
        now = datetime.fromtimestamp(self._clock.time(), UTC)
        end = min(now + LIFETIME, signer.not_valid_after_utc)
        if end <= now:
            raise InvalidArgumentError(
                f"the issuer certificate in {self._folder} expired at {end:%Y-%m-%d %H:%M} UTC; renew it"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
            .issuer_name(signer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLIER)
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(signing_key, hashes.SHA256())
        )
        return Certificate(
            chain=certificate.public_bytes(serialization.Encoding.PEM) + authority.chain,
            key=key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            authority=authority.authority,
            renew_at=(now + (end - now) / 2).timestamp(),
        )

    def is_due(self, certificate: Certificate) -> bool:
        """Returns True if a certificate must be replaced, because of its age or a changed authority."""
        is_known = certificate.authority == self._files.current().authority
        return not is_known or self._clock.time() >= certificate.renew_at

    def _load(
        self, authority: Certificate
    ) -> tuple[x509.Certificate, CertificateIssuerPrivateKeyTypes]:
        try:
            signer = x509.load_pem_x509_certificate(authority.chain)
            key = serialization.load_pem_private_key(authority.key, password=None)
            basic = signer.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
            raise InvalidArgumentError(
                f"cannot read the issuer in {self._folder}: {error}; tls.crt must have a CA certificate "
                "(CA:TRUE) and tls.key its private key"
            ) from error
        if not basic.ca:
            raise InvalidArgumentError(
                f"the certificate {self._folder / 'tls.crt'} must be a CA certificate (CA:TRUE)"
            )
        return signer, key  # type: ignore[return-value]  # other kinds of keys have no certificates


def create_authority(folder: Path) -> None:
    """Creates a folder with a new authority, which only this user can read, for an :class:`Issuer`.

    For the services of one command on one or several hosts, whose folder is deleted with the command.
    """
    folder.mkdir(mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slipstream")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + _AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for file, content in (("tls.crt", certificate), ("tls.key", private), ("ca.crt", certificate)):
        (folder / file).touch(mode=0o600)
        (folder / file).write_bytes(content)


class IssuedTls:
    """Certificate that its process issues for itself and renews; it is never written to disk.

    Raises:
        InvalidArgumentError: If the issuer cannot sign.
    """

    def __init__(self, issuer: Issuer, name: str) -> None:
        self._issuer = issuer
        self._name = name
        self._current = issuer.issue(name)

    def current(self) -> Certificate:
        """Returns the current certificate; if renewal fails, the old one until it expires."""
        if self._issuer.is_due(self._current):
            try:
                self._current = self._issuer.issue(self._name)
            except InvalidArgumentError as error:
                _failures.warning("certificate renewal failed", why=str(error))
        return self._current
