"""Servers of a fleet on this host, to try a fleet, to test it and to measure it."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import torch
from transformers import PretrainedConfig

from services.common.models.vision import checkpoint_config
from services.common.runspec.engines import ENGINES
from services.extras.fleets.serve import as_options, server_command, server_environment
from services.rollout.engines.engine_config import cached_config_folder, write_sglang_config

TOKEN = "the-servers-token"  # noqa: S105 -- of servers on loopback
"""Token of all servers of this module."""
_LOG_CHARACTERS = 4000
_START_S: Final = 900.0
"""Longest start of a server: a busy host takes minutes."""


SGLANG_OPTIONS: Final = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--load-format", "dummy"),
    *("--grammar-backend", "none", "--enable-fp32-lm-head", "--incremental-streaming-output"),
    "--sleep-on-idle",  # otherwise each idle server takes a core
)
"""Options of SGLang for a server of a fleet that receives its weights from a run."""


class LocalServer(ABC):
    """One server of a model with random weights; it can be killed and started again.

    Args:
        folder: Folder for the model's configuration and the log.
        config: Configuration of the model, or a folder with its configuration and weights.
        options: Further options of the server's command line.
    """

    engine: ClassVar[str]
    """Value of ``rollout.engine`` for a run that attaches."""

    def __init__(self, folder: Path, config: PretrainedConfig | Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        self.is_cpu = not torch.cuda.is_available()
        if isinstance(config, Path):
            self._model, options = config, ("--load-format", "auto", *options)
        else:
            self._model = self.write_config(config, folder / "models")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def write_config(self, config: PretrainedConfig, folder: Path) -> Path:
        """Writes the model's configuration; returns its folder."""

    @abstractmethod
    def command(self, model: Path, options: Sequence[str]) -> list[str]:
        """Returns the command line.

        Args:
            model: Folder with the model's configuration.
            options: Host, port and further options.
        """

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Environment variables that the server needs."""

    def start(self) -> None:
        """Starts the process; :meth:`wait` waits until it serves."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        environment = {
            **self.environment,
            # Packages that only this process sees, such as those of a checkout.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 -- its parts are constants and options
                self.command(self._model, [*address, *self._options]),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = _START_S) -> None:
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
        raise RuntimeError(f"{self.address} does not serve:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]

    def _is_healthy(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/health", timeout=5, trust_env=False).is_success
        return False

    def drain(self, timeout_s: float) -> None:
        """Asks the server to end, as Kubernetes does, and waits until it has ended.

        Raises:
            TimeoutError: If it has not ended in time; with the end of its log.
        """
        assert self._process is not None, "the server was not started"
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(
                f"{self.address} goes on {timeout_s:.0f} s after SIGTERM:\n{self._end_of_log()}"
            ) from error
        self.kill()

    def kill(self) -> None:
        """Kills the server with all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class LocalVllm(LocalServer):
    """A vLLM server."""

    engine = "vllm-server"

    def write_config(self, config: PretrainedConfig, folder: Path) -> Path:
        return cached_config_folder(checkpoint_config(config), folder)

    def command(self, model: Path, options: Sequence[str]) -> list[str]:
        arguments = (
            *("--model", str(model), "--disable-log-stats", "--disable-uvicorn-access-log"),
            *options,
        )
        return server_command(arguments, is_cpu=self.is_cpu)

    @property
    def environment(self) -> Mapping[str, str]:
        return {**server_environment(is_cpu=self.is_cpu), "VLLM_API_KEY": TOKEN}


class LocalSglang(LocalServer):
    """An SGLang server."""

    engine = "sglang-server"

    def write_config(self, config: PretrainedConfig, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_sglang_config(config, str(folder))
        return folder

    def command(self, model: Path, options: Sequence[str]) -> list[str]:
        of_cpu = as_options(ENGINES["sglang"].cpu_arguments) if self.is_cpu else []
        device = "cpu" if self.is_cpu else "cuda"
        arguments = ("--model-path", str(model), "--device", device, "--api-key", TOKEN)
        return [
            sys.executable,
            "-m",
            "sglang.launch_server",
            *arguments,
            *SGLANG_OPTIONS,
            *of_cpu,
            *options,
        ]

    @property
    def environment(self) -> Mapping[str, str]:
        kind = ENGINES["sglang"]
        return {**kind.environment, **(kind.cpu_environment if self.is_cpu else {}), **os.environ}


@contextmanager
def local_servers(
    kind: type[LocalServer], config: PretrainedConfig | Path, number: int, *options: str
) -> Iterator[list[LocalServer]]:
    """Yields servers that serve; ends them."""
    with tempfile.TemporaryDirectory() as name:
        servers = [kind(Path(name), config, *options) for _ in range(number)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait()
            yield servers
        finally:
            for server in servers:
                server.kill()


def import_few_models() -> None:
    """Lets SGLang's servers import only Qwen 2 of all models, so that they start sooner."""
    package = importlib.util.find_spec("sglang")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        names = {path.stem for path in Path(folder, "srt", "models").glob("*.py")} - {"qwen2"}
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names))


def engine_arguments(servers: list[LocalServer]) -> Mapping[str, Any]:
    """Returns ``rollout.engine_arguments`` for servers, with the value of the token's secret."""
    return {"addresses": [server.address for server in servers], "token": TOKEN}
