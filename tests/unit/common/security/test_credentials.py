"""Tests that calls need a valid token and, with TLS, a valid certificate."""

import asyncio
import shutil
from contextlib import nullcontext, suppress
from functools import partial

import grpc
import pytest

from services.common import errors
from services.common.admission import AdmissionProxy
from services.common.rpc import server
from services.common.rpc.client import CHANNEL_OPTIONS, call, open_channel
from services.common.rpc.server import SERVER_OPTIONS, serve
from services.common.security.access import caller_run
from services.common.security.credentials import (
    SERVICES,
    Identity,
    acting_as,
    bearer_of,
    issue_token,
    read_key,
)
from services.common.security.tls import ANY_WORKER, TlsFiles, peer_name
from slipstream.controller.v1 import membership_pb2 as pb
from slipstream.controller.v1 import membership_pb2_grpc as pb_grpc
from tests.helpers.pki import make_authority

KEY = b"k" * 32
SERVICE = Identity(key=KEY)


def worker_of(run_id: str, key: bytes = KEY) -> Identity:
    return Identity(run_token=issue_token(key, run_id))


class Rendezvous(pb_grpc.RendezvousServiceServicer):
    """Service that answers with the run of the authenticated caller."""

    async def GetValue(self, request, context):
        return pb.GetValueResponse(value=str(caller_run()).encode())


def register(server):
    pb_grpc.add_RendezvousServiceServicer_to_server(Rendezvous(), server)


async def ask(server: Identity, client: Identity, *, scope="run_a/1", peer="controller", run_id=""):
    """Returns the server's response to the client, or the error."""
    with acting_as(server):
        serving = serve("127.0.0.1:0", register)
    with acting_as(server):
        port = await serving.__aenter__()
    with acting_as(client):
        channel = open_channel(f"127.0.0.1:{port}", peer, run_id=run_id)
    try:
        async with channel:
            stub = pb_grpc.RendezvousServiceStub(channel)
            request = pb.GetValueRequest(scope=scope)
            return (await call(stub.GetValue, request, timeout_s=5.0)).value.decode()
    except errors.ServiceError as error:
        return error
    finally:
        await serving.__aexit__(None, None, None)


def test_a_token_names_its_run_and_fits_one_key_only():
    token = issue_token(KEY, "run_a")
    assert bearer_of(KEY, token) == "run_a"
    assert bearer_of(b"x" * 32, token) is None
    assert bearer_of(KEY, token.replace("run_a", "run_b")) is None
    assert bearer_of(KEY, token.replace("run_a", SERVICES)) is None
    assert bearer_of(KEY, "") is None


async def test_a_worker_reaches_only_its_run():
    assert await ask(SERVICE, worker_of("run_a")) == "run_a"
    for scope in ("run_b/1", "", "run_a1/1"):
        refused = await ask(SERVICE, worker_of("run_a"), scope=scope)
        assert type(refused) is errors.PermissionDeniedError


async def test_services_act_for_every_run():
    assert await ask(SERVICE, SERVICE, scope="run_b/1") == "None"


@pytest.mark.parametrize(
    "client", [Identity(), worker_of("run_a", b"x" * 32), Identity(run_token="slp_user")]
)
async def test_callers_without_a_known_token_are_rejected(client):
    assert type(await ask(SERVICE, client)) is errors.UnauthenticatedError


async def test_nothing_is_read_of_a_caller_that_is_not_known():
    read = []

    def deserialize(data):
        read.append(len(data))
        return pb.GetValueRequest.FromString(data)

    async def answer(request, context):
        return pb.GetValueResponse()

    def register_counting(server):
        handler = grpc.unary_unary_rpc_method_handler(
            answer, deserialize, pb.GetValueResponse.SerializeToString
        )
        methods = {"GetValue": handler}
        name = "slipstream.controller.v1.RendezvousService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))

    with acting_as(SERVICE):
        serving = serve("127.0.0.1:0", register_counting)
        port = await serving.__aenter__()
    request = pb.GetValueRequest(scope="run_a/1", key="k" * (1 << 20))
    # The authenticated caller is first, because both calls may share a connection, whose limits it lifts.
    for client, error in ((SERVICE, None), (Identity(), errors.UnauthenticatedError)):
        with acting_as(client):
            channel = open_channel(f"127.0.0.1:{port}", "controller")
        async with channel:
            stub = pb_grpc.RendezvousServiceStub(channel)
            with pytest.raises(error) if error else nullcontext():
                await call(stub.GetValue, request, timeout_s=5.0)
        assert read == [request.ByteSize()]
    await serving.__aexit__(None, None, None)


async def test_an_invalid_message_is_an_invalid_argument():
    async with (
        serve("127.0.0.1:0", register) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        method = channel.unary_unary("/slipstream.controller.v1.RendezvousService/GetValue")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(b"\xff" * 20, timeout=5.0)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_silent_connection_is_closed(certificates, monkeypatch, has_tls):
    monkeypatch.setattr(server, "AdmissionProxy", partial(AdmissionProxy, deadline_s=0.1))
    with acting_as(tls_of(certificates, "controller") if has_tls else Identity()):
        async with serve("127.0.0.1:0", register) as port, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                await reader.read()  # a server may send its HTTP/2 settings first
            writer.close()


async def test_a_worker_accepts_only_the_token_of_its_run():
    worker = worker_of("run_a")
    assert await ask(worker, SERVICE, run_id="run_a") == "None"
    assert type(await ask(worker, SERVICE, run_id="run_b")) is errors.UnauthenticatedError
    assert type(await ask(worker, worker_of("run_b"))) is errors.UnauthenticatedError


async def test_without_an_identity_everybody_is_served():
    assert await ask(Identity(), Identity()) == "None"


def test_secrets_are_not_shown():
    assert "kkkk" not in repr(SERVICE)
    assert "slr_" not in repr(worker_of("run_a"))


def test_a_short_key_is_rejected(tmp_path):
    (tmp_path / "key").write_text("short")
    with pytest.raises(errors.InvalidArgumentError, match="openssl"):
        read_key(tmp_path / "key")


NAMES = {
    "controller": "controller.slipstream",
    "run_a": "run-a.worker.slipstream",
    "run_b": "run-b.worker.slipstream",
    "any": ANY_WORKER,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    authority = make_authority(tmp_path_factory.mktemp("pki"))
    for owner, name in NAMES.items():
        authority.issue(owner, user=owner, hosts=(name,))
    return authority.folder


def tls_of(folder, owner: str, *, key=b"", run_token="") -> Identity:
    files = TlsFiles(
        certificate=folder / f"{owner}.crt",
        key=folder / f"{owner}.key",
        authority=folder / "ca.crt",
    )
    return Identity(tls=files, key=key, run_token=run_token)


def certified_worker(folder, owner: str, run_id: str = "run_a") -> Identity:
    return tls_of(folder, owner, run_token=issue_token(KEY, run_id))


async def test_with_tls_both_sides_show_certificates(certificates):
    controller = tls_of(certificates, "controller", key=KEY)
    assert await ask(controller, certified_worker(certificates, "run_a")) == "run_a"
    assert type(await ask(controller, worker_of("run_a"))) is errors.UnavailableError


async def test_a_peer_with_another_certificate_is_not_called(certificates):
    controller = tls_of(certificates, "controller", key=KEY)
    for owner, fits in (("run_a", True), ("any", True), ("run_b", False), ("controller", False)):
        worker = certified_worker(certificates, owner)
        answer = await ask(worker, controller, peer="worker", run_id="run_a")
        assert (answer == "None") is fits, owner
        assert fits or type(answer) is errors.UnavailableError


async def test_the_token_of_a_run_is_worth_nothing_without_its_certificate(certificates):
    controller = tls_of(certificates, "controller", key=KEY)
    for owner, fits in (("run_a", True), ("any", True), ("run_b", False), ("controller", False)):
        answer = await ask(controller, certified_worker(certificates, owner))
        assert (answer == "run_a") is fits, owner
        assert fits or type(answer) is errors.PermissionDeniedError


async def test_the_key_of_the_services_is_worth_nothing_with_a_workers_certificate(certificates):
    controller = tls_of(certificates, "controller", key=KEY)
    for owner in ("run_a", "any"):
        refused = await ask(controller, tls_of(certificates, owner, key=KEY))
        assert type(refused) is errors.PermissionDeniedError
    assert await ask(controller, controller) == "None"


async def test_a_worker_accepts_services_and_no_other_worker(certificates):
    worker = certified_worker(certificates, "run_a")
    for owner in ("run_a", "run_b"):
        caller = certified_worker(certificates, owner)
        refused = await ask(worker, caller, peer="worker", run_id="run_a")
        assert type(refused) is errors.PermissionDeniedError


async def test_servers_and_open_channels_take_renewed_certificates(certificates, tmp_path):
    for file in certificates.glob("*"):
        shutil.copy(file, tmp_path / file.name)
    with acting_as(tls_of(tmp_path, "controller", key=KEY)):
        serving = serve("127.0.0.1:0", register)
        port = await serving.__aenter__()
    with acting_as(certified_worker(tmp_path, "run_a")):
        channel = open_channel(f"127.0.0.1:{port}", "controller")
    async with channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        request = pb.GetValueRequest(scope="run_a/1")
        before = channel.current()
        assert (await call(stub.GetValue, request, timeout_s=5.0)).value == b"run_a"
        assert channel.current() is before, "nothing has changed"
        renewed = make_authority(tmp_path)  # certificates of the previous authority are invalid
        for owner, name in NAMES.items():
            renewed.issue(owner, user=owner, hosts=(name,))
        assert (await call(stub.GetValue, request, timeout_s=5.0)).value == b"run_a"
        assert channel.current() is not before
    await serving.__aexit__(None, None, None)


def test_certificates_that_are_being_written_are_taken_when_they_are_whole(certificates, tmp_path):
    for file in certificates.glob("*"):
        shutil.copy(file, tmp_path / file.name)
    files = tls_of(tmp_path, "controller").tls
    before = files.current()
    (tmp_path / "controller.key").unlink()
    assert files.current() is before
    (tmp_path / "controller.key").write_bytes(b"another")
    assert files.current().key == b"another"
    with pytest.raises(errors.InvalidArgumentError, match=r"none\.crt"):
        tls_of(tmp_path, "none").tls.current()


def test_certificate_names_have_role_and_run():
    assert peer_name("controller") == "controller.slipstream"
    assert peer_name("transferqueue", "run_a") == "transferqueue.slipstream"
    assert peer_name("worker", "run_a") == "run-a.worker.slipstream"


def test_servers_bear_the_pings_that_clients_send():
    server, client = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    # A server closes a connection with "too many pings" if the client pings more often than allowed.
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms <= client["grpc.keepalive_time_ms"] / 2
    assert server["grpc.keepalive_permit_without_calls"] == 1
