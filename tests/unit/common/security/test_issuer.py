"""Tests of short-lived certificates that services issue from a root or an intermediate authority."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common import errors
from services.common.rpc.client import call, open_channel
from services.common.rpc.server import serve
from services.common.security.credentials import Identity, acting_as, issue_token
from services.common.security.issuer import LIFETIME, IssuedTls, Issuer, create_authority
from services.common.security.tls import TlsFiles
from slipstream.controller.v1 import membership_pb2 as pb
from slipstream.controller.v1 import membership_pb2_grpc as pb_grpc
from tests.unit.common.security.test_credentials import KEY, register

PEM = serialization.Encoding.PEM
DAY_S = 86_400.0


class Clock:
    def __init__(self):
        self.now = datetime.now(UTC).timestamp()

    def time(self):
        return self.now


def make_issuer(folder, *, above=None, ends_after=timedelta(days=30), is_authority=True):
    """Writes a root or an intermediate authority, and returns its certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
    signer, signing_key = above or (None, key)
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(signer.subject if signer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + ends_after)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(signing_key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    (folder / "tls.crt").write_bytes(certificate.public_bytes(PEM))
    private = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "tls.key").write_bytes(key.private_bytes(PEM, private, serialization.NoEncryption()))
    (folder / "ca.crt").write_bytes((signer or certificate).public_bytes(PEM))
    return certificate, key


def ends_of(certificate):
    return x509.load_pem_x509_certificate(certificate.chain).not_valid_after_utc.timestamp()


@pytest.mark.parametrize("kind", ["root", "intermediate", "of one command"])
async def test_a_worker_reaches_a_service_with_an_issued_certificate(tmp_path, kind):
    if kind == "of one command":
        create_authority(tmp_path / "issuer")
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / "issuer").iterdir()} == {0o600}
    else:
        above = make_issuer(tmp_path / "root") if kind == "intermediate" else None
        make_issuer(tmp_path / "issuer", above=above)
    issuer = Issuer(tmp_path / "issuer")
    service = Identity(tls=IssuedTls(issuer, "controller.slipstream"), issue=issuer.issue, key=KEY)
    issued = service.certificate_for("run_a")
    parts = {"certificate": issued.chain, "key": issued.key, "authority": issued.authority}
    for name, pem in parts.items():
        (tmp_path / name).write_bytes(pem)
    files = TlsFiles(**{name: tmp_path / name for name in parts})
    with acting_as(service):
        serving = serve("127.0.0.1:0", register)
        port = await serving.__aenter__()
    with acting_as(Identity(tls=files, run_token=issue_token(KEY, "run_a"))):
        channel = open_channel(f"127.0.0.1:{port}", "controller")
    async with channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        answer = await call(stub.GetValue, pb.GetValueRequest(scope="run_a/1"), timeout_s=5.0)
    assert answer.value == b"run_a"
    await serving.__aexit__(None, None, None)


def test_certificates_last_days_and_are_renewed_when_half_of_their_time_is_over(tmp_path):
    make_issuer(tmp_path / "issuer")
    clock = Clock()
    issued_tls = IssuedTls(Issuer(tmp_path / "issuer", clock=clock), "controller.slipstream")
    first = issued_tls.current()
    assert ends_of(first) == pytest.approx(clock.now + LIFETIME.total_seconds(), abs=2)
    clock.now += 1.4 * DAY_S
    assert issued_tls.current() is first
    clock.now += 0.2 * DAY_S
    second = issued_tls.current()
    assert second is not first
    assert second.key != first.key
    assert ends_of(second) > ends_of(first)


def test_a_certificate_ends_no_later_than_its_issuer(tmp_path):
    make_issuer(tmp_path / "issuer", ends_after=timedelta(hours=10))
    clock = Clock()
    issued_tls = IssuedTls(Issuer(tmp_path / "issuer", clock=clock), "controller.slipstream")
    assert ends_of(issued_tls.current()) == pytest.approx(clock.now + 36_000, abs=2)
    first = issued_tls.current()
    clock.now += 11 * 3600
    assert issued_tls.current() is first, "what cannot be renewed is shown to its end"
    make_issuer(tmp_path / "issuer")
    assert issued_tls.current() is not first


def test_another_authority_renews_at_once(tmp_path):
    make_issuer(tmp_path / "issuer")
    issued_tls = IssuedTls(Issuer(tmp_path / "issuer"), "controller.slipstream")
    first = issued_tls.current()
    make_issuer(tmp_path / "issuer")
    assert issued_tls.current().authority != first.authority


def test_an_issuer_needs_a_valid_ca_certificate(tmp_path):
    make_issuer(tmp_path / "leaf", is_authority=False)
    make_issuer(tmp_path / "old", ends_after=timedelta(minutes=-1))
    make_issuer(tmp_path / "torn")
    (tmp_path / "torn" / "tls.key").write_text("nothing")
    for name in ("leaf", "old", "torn", "none"):
        with pytest.raises(errors.InvalidArgumentError, match=name):
            Issuer(tmp_path / name).issue("controller.slipstream")
