"""vLLM servers of a fleet on this host, to try a fleet, to test it and to measure it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PretrainedConfig

from services.extras.fleets.serve import server_command, server_environment
from services.rollout.engines.engine_config import cached_config_folder

TOKEN = "the-servers-token"  # noqa: S105 -- of servers on loopback
"""Token of all servers of this module."""
_LOG_CHARACTERS = 4000


class LocalServer:
    """One server of a model with random weights; it can be killed and started again.

    Args:
        folder: Folder for the model's configuration and the log.
        options: Further options of ``vllm serve``.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{self.port}.log"
        model = cached_config_folder(config, folder / "models")
        self._is_cpu = not torch.cuda.is_available()
        own = ("--model", str(model), "--host", "127.0.0.1", "--port", str(self.port))
        self._command = server_command([*own, "--disable-log-stats", *options], is_cpu=self._is_cpu)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; :meth:`wait` waits until it serves."""
        environment = {
            **server_environment(is_cpu=self._is_cpu),
            "VLLM_API_KEY": TOKEN,
            # Packages that only this process sees, such as those of a checkout.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 -- its parts are constants and options
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, timeout_s: float = 300) -> None:
        """Waits until the server is healthy.

        Raises:
            RuntimeError: If it ends instead, or takes longer; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        assert self._process is not None, "the server was not started"
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._is_healthy():
                return
            time.sleep(0.2)
        log = self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]
        raise RuntimeError(f"{self.address} does not serve:\n{log}")

    def _is_healthy(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/health", timeout=5, trust_env=False).is_success
        return False

    def kill(self) -> None:
        """Kills the server with all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def local_servers(
    config: PretrainedConfig, number: int, *options: str
) -> Iterator[list[LocalServer]]:
    """Yields servers that serve; ends them."""
    with tempfile.TemporaryDirectory() as name:
        servers = [LocalServer(Path(name), config, *options) for _ in range(number)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait()
            yield servers
        finally:
            for server in servers:
                server.kill()


def engine_arguments(servers: list[LocalServer]) -> Mapping[str, Any]:
    """Returns ``rollout.engine_arguments`` for servers, with the value of the token's secret."""
    return {"addresses": [server.address for server in servers], "token": TOKEN}
