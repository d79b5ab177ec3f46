"""vLLM's router lists its servers in the form that a run reads."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services.extras.fleets.client import ServerAwayError
from services.extras.fleets.vllm_server import VllmServer
from services.rollout.calls.outside import AddressPolicy
from tests.helpers.ports import free_port

PYTHON = os.environ.get("SLIPSTREAM_CLIENTS_PYTHON", sys.executable)
TOKEN = "a-token"
_TIMEOUT_S = 90


@cache
def _is_installed() -> bool:
    command = (PYTHON, "-c", "import vllm_router.launch_router")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class _Healthy(BaseHTTPRequestHandler):
    """Answers every question with an empty body."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Writes nothing."""


@contextmanager
def _server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _router(servers: Sequence[str], log: Path) -> Iterator[str]:
    port, metrics_port = free_port(), free_port()
    command = [
        *(PYTHON, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--api-key", TOKEN, "--worker-urls", *servers),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_vllm_s_router_is_asked_for_its_servers(tmp_path: Path) -> None:
    if not await asyncio.to_thread(_is_installed):
        pytest.skip("vLLM's router is not installed here")
    with ExitStack() as stack:
        servers = sorted(stack.enter_context(_server()) for _ in range(2))
        address = stack.enter_context(_router(servers, tmp_path / "router.log"))
        client = VllmServer(
            address, owner="run/rollout-0", reach=AddressPolicy(("127.0.0.1",)), token=TOKEN
        )
        listed: list[str] | None = None
        async with asyncio.timeout(_TIMEOUT_S):
            while listed != servers:
                try:
                    listed = await client.list_servers()
                except ServerAwayError:  # it starts
                    await asyncio.sleep(0.2)
        await client.close()
