"""Servers of a fleet: vLLM's own, on the CPU, as docs/fleets.md starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import PretrainedConfig

from services.common.runspec.engines import ENGINES
from services.rollout.engines.engine_config import cached_config_folder

TOKEN = "the-servers-token"


class VllmServer:
    """One server of a model with random weights; it can be killed and started again.

    Args:
        folder: Folder for its configuration and log.
        options: Further options of ``vllm serve``.
    """

    def __init__(
        self,
        folder: Path,
        config: PretrainedConfig,
        *options: str,
        dtype: str = "float32",
        max_model_len: int = 512,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{self.port}.log"
        model = cached_config_folder(config, folder / "models")
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "policy"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", "16"),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *("--hf-overrides", json.dumps({"head_dtype": "float32"})),
            *("--middleware", "services.extras.fleets.server.FleetMember"),
            *("--worker-extension-cls", "services.extras.fleets.worker.FleetWorker"),
            # For the CPU build only: see the engine's arguments on a CPU.
            *("--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--distributed-executor-backend", "uni", "--no-enable-chunked-prefill"),
            *("--max-num-batched-tokens", str(max(512, max_model_len))),
            "--disable-log-stats",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; :meth:`wait` waits until it serves."""
        kind = ENGINES["vllm"]
        environment = {
            **os.environ,
            **kind.environment,
            **kind.cpu_environment,
            "VLLM_API_KEY": TOKEN,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
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
            with suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.address} does not serve:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Kills the server with all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def vllm_servers(
    config: PretrainedConfig, number: int = 1, **options: object
) -> Iterator[list[VllmServer]]:
    """Yields servers that serve; ends them."""
    with tempfile.TemporaryDirectory() as name:
        servers = [
            VllmServer(Path(name), config, **options)  # type: ignore[arg-type]
            for _ in range(number)
        ]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait()
            yield servers
        finally:
            for server in servers:
                server.kill()


def engine_arguments(servers: list[VllmServer]) -> Mapping[str, object]:
    """Returns ``rollout.engine_arguments`` of a run that uses servers; the token is the secret's value."""
    return {"addresses": [server.address for server in servers], "token": TOKEN}
