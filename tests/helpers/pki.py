"""Certificates and kubeconfigs of a test session's cluster."""

import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

_LIFETIME = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority that writes the certificates it signs to a folder."""

    folder: Path
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey

    def issue(self, name: str, *, user: str, group: str = "", hosts: tuple[str, ...] = ()) -> None:
        """Writes ``name.crt`` and ``name.key`` for a user in a group, or for a server with host names."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        builder = _builder(_name(user, group), self.certificate.subject, key)
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        _write(self.folder, name, builder.sign(self.key, hashes.SHA256()), key)

    def kubeconfig(self, name: str, server: str) -> Path:
        """Writes a kubeconfig for an issued user."""
        path = self.folder / f"{name}.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": server,
                        "certificate-authority": str(self.folder / "ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(self.folder / f"{name}.crt"),
                        "client-key": str(self.folder / f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")
        return path


def make_authority(folder: Path) -> Authority:
    """Creates a certificate authority, and the key that signs service account tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = _name("slipstream-test-ca", "")
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca", certificate, key)
    authority = Authority(folder, certificate, key)
    authority.issue("service-accounts", user="service-accounts")
    return authority


def _builder(
    subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _name(user: str, group: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, certificate: x509.Certificate, key: rsa.RSAPrivateKey) -> None:
    pem = serialization.Encoding.PEM
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
