"""The services on this machine: a controller and a transferqueue, which start all else.

Nothing outlives the block that starts them: children are asked to stop, then killed, and workers whose
controller died are found because this process adopts orphans.
"""

import asyncio
import ctypes
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 6.0
_LAST_LINES = 15
_PR_SET_CHILD_SUBREAPER = 36


class ServiceExitedError(RuntimeError):
    """A service ended by itself; the message holds its last lines."""


@dataclass(slots=True)
class LocalServices:
    """Running services."""

    url: str = ""
    """REST address of the controller."""
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)

    async def first_exit(self) -> None:
        """Wait until a service ends, and raise.

        Raises:
            ServiceExitedError: With the service's last lines.
        """
        async with asyncio.TaskGroup() as tasks:
            for name, process in self.processes.items():
                tasks.create_task(self._raise_at_exit(name, process))

    async def _raise_at_exit(self, name: str, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        raise self._exited(name)

    def _exited(self, name: str) -> ServiceExitedError:
        code = self.processes[name].returncode
        return ServiceExitedError(
            f"{name} ended with exit code {code}; its last lines ({self.logs[name]}):\n"
            f"{_last_lines(self.logs[name])}"
        )


@asynccontextmanager
async def local_services(state_directory: Path, *, port: int = 0) -> AsyncIterator[LocalServices]:
    """Start a transferqueue and a controller on loopback, and end them with all their children.

    Args:
        state_directory: Folder of the database, the runs and the logs.
        port: Port of the REST API; 0 takes a free one.

    Raises:
        ServiceExitedError: If one of them does not start.
    """
    logs = state_directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _adopt_orphans()
    services = LocalServices()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        try:
            queue = await _start(
                services, "transferqueue", logs, Path(folder), {"STOP_ON_STDIN_EOF": "true"}
            )
            controller = await _start(
                services,
                "controller",
                logs,
                Path(folder),
                {
                    "TRANSFERQUEUE_ADDRESS": queue["address"],
                    "STATE_DIRECTORY": str(state_directory),
                    "REST_BIND": f"127.0.0.1:{port}",
                    "STOP_ON_STDIN_EOF": "true",
                },
            )
            services.url = controller["rest"]
            yield services
        finally:
            await _stop_everything(services)


async def _start(
    services: LocalServices, name: str, logs: Path, folder: Path, settings: Mapping[str, str]
) -> dict[str, str]:
    """Start one service and return the addresses that it announces."""
    ready_file = folder / name
    log = services.logs[name] = logs / f"{name}.log"
    prefix = f"SLIPSTREAM_{name.upper()}_"
    environment = {
        **os.environ,
        **{prefix + key: value for key, value in settings.items()},
        f"{prefix}READY_FILE": str(ready_file),
    }
    with log.open("wb") as output:
        process = services.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{name}",
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not ready_file.exists():
                if process.returncode is not None:
                    raise services._exited(name)  # noqa: SLF001  the same module
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise ServiceExitedError(
            f"{name} did not start within {_START_TIMEOUT_S:.0f} s; see {log}"
        ) from error
    addresses: dict[str, str] = json.loads(ready_file.read_text(encoding="utf-8"))
    return addresses


async def _stop_everything(services: LocalServices) -> None:
    """Ask the controller first, because it stops its workers; kill whatever is left."""
    try:
        async with asyncio.timeout(_STOP_GRACE_S):
            for name in reversed(services.processes):
                process = services.processes[name]
                if process.returncode is None:
                    process.terminate()
                await process.wait()
    except TimeoutError:
        pass
    leftovers = psutil.Process().children(recursive=True)
    for leftover in leftovers:
        leftover.kill()
    await asyncio.to_thread(psutil.wait_procs, leftovers, timeout=1.0)


def _adopt_orphans() -> None:
    """Become the parent of workers whose controller dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _last_lines(log: Path) -> str:
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(deque(lines, maxlen=_LAST_LINES)).rstrip()
