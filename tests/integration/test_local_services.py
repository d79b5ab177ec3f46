"""Services on a developer's machine: start, end and access."""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence

import grpc
import psutil
import pytest
import zmq
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from services.cli.local import ServiceExitedError, local_services
from tests.helpers.cli import QUEUE_BYTES, environment
from tests.helpers.engines import until
from tests.helpers.processes import below


@pytest.fixture(autouse=True)
def _small_queue(monkeypatch) -> None:
    monkeypatch.setenv(QUEUE_BYTES, environment()[QUEUE_BYTES])


def started() -> set[str]:
    """Returns the services that are children of this process."""
    return {str(words) for _, words in below(psutil.Process()) if "services." in str(words)}


async def test_services_that_do_not_start_say_why_and_leave_nothing(tmp_path):
    umask = os.umask(0o022)
    before = started()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ServiceExitedError, match="cannot listen") as error,
    ):
        async with local_services(tmp_path, port=listener.getsockname()[1]):
            pytest.fail("the port is in use")
    assert "File " not in str(error.value), "a traceback hides the reason"
    assert os.umask(umask) == 0o022
    assert started() <= before


async def test_services_shut_others_out_and_leave_alone_what_was_started_before(tmp_path):
    before = await asyncio.create_subprocess_exec("sleep", "600")
    async with local_services(tmp_path) as services:
        process = psutil.Process(services.services[0].process.pid)
        ports = {at.laddr.port for at in process.net_connections("tcp") if at.status == "LISTEN"}
        assert len(ports) == 2
        with zmq.Context() as context:
            for port in ports:
                with context.socket(zmq.DEALER) as peer:
                    peer.setsockopt(zmq.LINGER, 0)
                    peer.setsockopt(zmq.RCVTIMEO, 1000)
                    peer.connect(f"tcp://127.0.0.1:{port}")
                    peer.send(b"anything")
                    with pytest.raises(zmq.Again):
                        peer.recv()
        described = await asyncio.to_thread(services_of, services.grpc_address)
    assert before.returncode is None
    before.kill()
    assert await before.wait() == -signal.SIGKILL
    # Clients such as grpcurl list the services of a developer's controller.
    assert "slipstream.controller.v1.RunService" in described
    assert not any("Membership" in name for name in described)


def services_of(address: str) -> Sequence[str]:
    """Returns the gRPC services that a server describes."""
    with grpc.insecure_channel(address) as channel:
        return ProtoReflectionDescriptorDatabase(channel).get_services()


async def test_a_restart_is_reported(tmp_path, capsys):
    async with local_services(tmp_path, max_restarts=1) as services:
        queue = services.services[0]
        ended = queue.process.pid
        supervision = asyncio.ensure_future(services.supervise())
        await asyncio.sleep(0)
        queue.process.kill()
        async with asyncio.timeout(60):
            # A new process id shows that the next process exists, its ready file that it serves.
            await until(
                lambda: queue.process.pid != ended and queue.ready_file.exists(), poll_s=0.1
            )
        supervision.cancel()
    error = capsys.readouterr().err
    assert "transferqueue" in error
    assert str(queue.log) in error.replace("\n", "")
