"""The services on this machine: a controller and a transferqueue, which start all else.

Nothing outlives the block that starts them: children are asked to stop, then killed, and workers whose
controller died are found because this process adopts orphans.
"""

import asyncio
import ctypes
import json
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.common.task_group import TaskGroup
from services.controller.launch.log_files import last_lines

_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 6.0
_PR_SET_CHILD_SUBREAPER = 36


class ServiceExitedError(RuntimeError):
    """A service ended by itself; the message holds its last lines."""


@dataclass(slots=True)
class _Service:
    """One service and how it is started."""

    name: str
    log: Path
    ready_file: Path
    settings: dict[str, str]
    num_restarts: int = 0
    process: asyncio.subprocess.Process | None = None


@dataclass(slots=True)
class LocalServices:
    """Running services."""

    max_restarts: int
    url: str = ""
    """REST address of the controller."""
    grpc_address: str = ""
    """``host:port`` of the controller's gRPC server."""
    services: list[_Service] = field(default_factory=list)

    async def keep(self) -> None:
        """Start services again that end, as often as that is allowed; then raise.

        Raises:
            ServiceExitedError: With the service's last lines.
        """
        async with TaskGroup() as tasks:
            for service in self.services:
                tasks.create_task(self._keep(service))

    async def _keep(self, service: _Service) -> None:
        while True:
            assert service.process is not None
            await service.process.wait()
            if service.num_restarts >= self.max_restarts:
                raise _exited(service)
            service.num_restarts += 1
            try:
                await _start(service)
            except ServiceExitedError:
                # It ended again before it was up; that counts like any other end.
                continue


@asynccontextmanager
async def local_services(
    state_directory: Path, *, port: int = 0, max_restarts: int = 0
) -> AsyncIterator[LocalServices]:
    """Start a transferqueue and a controller on loopback, and end them with all their children.

    Args:
        state_directory: Folder of the database, the runs and the logs.
        port: Port of the REST API; 0 takes a free one.
        max_restarts: Times that each of them is started again when it ends by itself.

    Raises:
        ServiceExitedError: If one of them does not start.
    """
    logs = state_directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _adopt_orphans()
    services = LocalServices(max_restarts=max_restarts)

    async def start(name: str, folder: str, settings: dict[str, str]) -> dict[str, str]:
        service = _Service(name, logs / f"{name}.log", Path(folder) / name, settings)
        services.services.append(service)
        service.log.write_bytes(b"")
        while True:
            try:
                return await _start(service)
            except ServiceExitedError:
                code = None if service.process is None else service.process.returncode
                # What was killed may start; what gave up would do so again.
                if code is None or code >= 0 or service.num_restarts >= max_restarts:
                    raise
                service.num_restarts += 1

    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        # Only this user reads the folder, so other users of the machine reach the API but no worker.
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32), encoding="ascii")
        try:
            queue = await start(
                "transferqueue",
                folder,
                {"SNAPSHOT_FOLDER": f"{folder}/snapshots", "SERVICE_KEY_FILE": str(key)},
            )
            controller = await start(
                "controller",
                folder,
                {
                    "TRANSFERQUEUE_ADDRESS": queue["address"],
                    "STATE_DIRECTORY": str(state_directory),
                    "REST_BIND": f"127.0.0.1:{port}",
                    "INSECURE_DEV": "true",
                    "SERVICE_KEY_FILE": str(key),
                },
            )
            # Whoever is started again must be found where it was.
            services.services[0].settings["BIND"] = queue["address"]
            services.services[1].settings["BIND"] = controller["grpc"]
            services.url, services.grpc_address = controller["rest"], controller["grpc"]
            services.services[1].settings["REST_BIND"] = services.url.removeprefix("http://")
            yield services
        finally:
            await _stop_everything(services)


async def _start(service: _Service) -> dict[str, str]:
    """Start a service and return the addresses that it announces."""
    prefix = f"SLIPSTREAM_{service.name.upper()}_"
    service.ready_file.unlink(missing_ok=True)
    environment = {
        # Whoever uses this machine may have reward services on it.
        "SLIPSTREAM_ROLLOUT_REWARD_HOSTS": '["localhost", "127.0.0.1"]',
        **os.environ,
        **{prefix + key: value for key, value in service.settings.items()},
        f"{prefix}STOP_ON_STDIN_EOF": "true",
        f"{prefix}READY_FILE": str(service.ready_file),
    }
    with service.log.open("ab") as output:
        process = service.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{service.name}",
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not service.ready_file.exists():
                if process.returncode is not None:
                    raise _exited(service)
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise ServiceExitedError(
            f"{service.name} did not start within {_START_TIMEOUT_S:.0f} s; see {service.log}"
        ) from error
    addresses: dict[str, str] = json.loads(service.ready_file.read_text(encoding="utf-8"))
    return addresses


def _exited(service: _Service) -> ServiceExitedError:
    code = None if service.process is None else service.process.returncode
    return ServiceExitedError(
        f"{service.name} ended with exit code {code}; its last lines ({service.log}):\n"
        f"{last_lines(service.log)}"
    )


async def _stop_everything(services: LocalServices) -> None:
    """Ask the controller first, because it stops its workers; kill whatever is left."""
    try:
        async with asyncio.timeout(_STOP_GRACE_S):
            for service in reversed(services.services):
                if service.process is None:
                    continue
                if service.process.returncode is None:
                    service.process.terminate()
                await service.process.wait()
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
