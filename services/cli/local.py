"""Services of this machine: a controller and a transferqueue, which start everything else.

No process outlives the block that starts them. Children are asked to stop and then killed; workers
of a dead controller are found because this process adopts orphans.
"""

import asyncio
import ctypes
import importlib.util
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from services.cli.output import REPEAT_EVERY_S, errors, print_line
from services.cli.prepared import PreparedProcess
from services.cli.state_directory import known_token, lock_state_directory, process_folder
from services.common.callables import load_callable
from services.common.host import free_port
from services.common.launchers import LAUNCHERS
from services.common.parent import module_command
from services.common.security.issuer import create_authority
from services.common.task_group import TaskGroup
from services.controller.launch.process import begin_imports
from services.controller.launch.worker_process import last_lines

_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 6.0
# With less free space, no useful output can be written.
_MIN_FREE_BYTES = 1 << 20
# Only this user can read new files.
_UMASK = 0o077
# Below the launcher's ports for rendezvous and below Linux' ephemeral ports.
_PORTS = range(10_000, 20_000)
_PR_SET_CHILD_SUBREAPER = 36
_SERVICES = ("transferqueue", "controller")
# Packages with the most modules.
_LARGE_PACKAGES = ("torch", "transformers", "vllm", "sglang")
SAMPLE_FOLDER = "samples"
"""Name of the folder with kept samples, in the state directory."""


class ServiceExitedError(RuntimeError):
    """Reports that a service ended by itself; the message contains its last log lines."""


class _Process(Protocol):
    """Interface of a service's process, which ``asyncio.subprocess.Process`` implements."""

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""

    def terminate(self) -> None:
        """Sends SIGTERM."""

    async def wait(self) -> int:
        """Waits until it has ended."""


def write_bytecode() -> None:
    """Lets this process and its children write bytecode if large packages have none.

    Many images set ``PYTHONDONTWRITEBYTECODE``. If packages were installed without bytecode, each process of
    a run then compiles them again, which doubles the time of its imports.
    """
    specs = (importlib.util.find_spec(name) for name in _LARGE_PACKAGES)
    # A folder of bytecode that this user may not read raises an error in Path.exists().
    if any(spec and spec.cached and not os.path.exists(spec.cached) for spec in specs):  # noqa: PTH110
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


PreparedServices = MutableMapping[str, PreparedProcess]
"""Prepared processes that are not in use yet, by service."""


@contextmanager
def prepared_services(launcher: str = "process") -> Iterator[PreparedServices]:
    """Starts processes that import the services, for :func:`local_services`; finally kills unused ones.

    The imports take seconds. Meanwhile this process can check the specification. With other launchers than
    ``process`` there are none, because they also import what starts workers on this machine.
    """
    prepared: PreparedServices = {}
    try:
        for name in _SERVICES if sys.platform == "linux" and launcher == "process" else ():
            # The longest imports, those of workers, come first.
            before = begin_imports if name == "controller" else None
            prepared[name] = PreparedProcess(f"services.{name}", umask=_UMASK, before=before)
        yield prepared
    finally:
        for process in prepared.values():
            process.kill()


@dataclass(slots=True)
class _Service:
    """One service and its settings."""

    name: str
    log: Path
    ready_file: Path
    settings: dict[str, str]
    num_restarts: int = 0
    reported_at: float = -math.inf
    """Time of the last message about a restart."""
    prepared: PreparedProcess | None = None
    """Process for the first start, which has begun its imports."""
    process: _Process | None = None


@dataclass(slots=True)
class LocalServices:
    """The running services."""

    max_restarts: int
    url: str = ""
    """REST address of the controller."""
    token: str = ""
    """API token of an admin, created for this start."""
    grpc_address: str = ""
    """``host:port`` of the controller's gRPC server."""
    services: list[_Service] = field(default_factory=list)

    async def supervise(self) -> None:
        """Restarts services that end, up to ``max_restarts`` times each; then raises.

        Raises:
            ServiceExitedError: With the service's last log lines.
        """
        async with TaskGroup() as tasks:
            for service in self.services:
                tasks.create_task(self._supervise(service))

    async def start(self, service: _Service) -> dict[str, str]:
        """Starts another service and returns the addresses that it announces.

        A service that is killed during its start is restarted.

        Raises:
            ServiceExitedError: If the service does not start.
        """
        self.services.append(service)
        while True:
            try:
                return await _start(service)
            except ServiceExitedError:
                code = None if service.process is None else service.process.returncode
                # A killed service can succeed on a retry; one that exited by itself would fail
                # again.
                if code is None or code >= 0 or service.num_restarts >= self.max_restarts:
                    raise
                service.num_restarts += 1

    async def _supervise(self, service: _Service) -> None:
        while True:
            assert service.process is not None
            await service.process.wait()
            if service.num_restarts >= self.max_restarts:
                raise _exited(service)
            service.num_restarts += 1
            if time.monotonic() >= service.reported_at + REPEAT_EVERY_S:
                service.reported_at = time.monotonic()
                code = service.process.returncode
                print_line(
                    errors,
                    f"{service.name} exited with code {code} and is started again; its log is {service.log}",
                )
            try:
                await _start(service)
            except ServiceExitedError:
                # It ended before it was ready, which counts like any other exit, or it still starts.
                continue


@asynccontextmanager
async def local_services(
    state_directory: Path,
    *,
    port: int = 0,
    max_restarts: int = 0,
    prepared: PreparedServices | None = None,
    launcher: str = "process",
) -> AsyncIterator[LocalServices]:
    """Starts a transferqueue and a controller on this host; ends them with all their children.

    Args:
        launcher: Name of the launcher of workers, which determines the address of the services.
        state_directory: Folder of the database, the runs and the logs.
        port: Port of the REST API; 0 selects a free one.
        prepared: Processes of :func:`prepared_services`. Each process that is used is removed.

    Raises:
        ServiceExitedError: If a service does not start.
        SpecError: If the launcher cannot start workers from this host.
        StateInUseError: If another process uses the state directory.
    """
    site = load_callable(LAUNCHERS[launcher].site)()
    logs = state_directory / "logs"
    _adopt_orphans()
    prepared = {} if prepared is None else prepared
    prepared_pids = {process.pid for process in prepared.values()}
    strangers = [child for child in psutil.Process().children() if child.pid not in prepared_pids]
    services = LocalServices(max_restarts=max_restarts, token=f"slp_{secrets.token_urlsafe(32)}")

    with _files_of_this_user(), lock_state_directory(state_directory), process_folder() as folder:
        logs.mkdir(parents=True, exist_ok=True)

        def service(name: str, settings: dict[str, str]) -> _Service:
            log = logs / f"{name}.log"
            log.write_bytes(b"")
            return _Service(name, log, folder / name, settings, prepared=prepared.pop(name, None))

        # Only this user can read the folder, and with it use the API or connect to a worker.
        key, token = folder / "key", folder / "token"
        key.write_text(secrets.token_hex(32), encoding="ascii")
        token.write_text(services.token, encoding="ascii")
        common = {"SERVICE_KEY_FILE": str(key), "ADVERTISE_HOST": site.host}
        if site.has_other_hosts:
            create_authority(folder / "authority")
            common["TLS_ISSUER"] = str(folder / "authority")
        try:
            queue_settings = _queue_settings(site.host, folder, state_directory)
            transferqueue = service("transferqueue", {**common, **queue_settings})
            address = (await services.start(transferqueue))["address"]
            controller = service(
                "controller",
                {
                    **common,
                    "LAUNCHER": launcher,
                    "TRANSFERQUEUE_ADDRESS": address,
                    "STATE_DIRECTORY": str(state_directory),
                    "BIND": free_address(site.host),
                    "REST_BIND": f"127.0.0.1:{port}" if port else free_address(),
                    "ADMIN_TOKEN_FILE": str(token),
                    "GRPC_REFLECTION": "true",
                },
            )
            addresses = await services.start(controller)
            # The API is served on loopback only, whatever host name the controller advertises to workers.
            rest_port = addresses["rest"].rpartition(":")[2]
            services.url, services.grpc_address = f"http://127.0.0.1:{rest_port}", addresses["grpc"]
            # Restarted services must keep their addresses.
            transferqueue.settings["BIND"] = address
            controller.settings["BIND"] = services.grpc_address
            controller.settings["REST_BIND"] = services.url.removeprefix("http://")
            with known_token(services.url, services.token):
                yield services
        finally:
            await _stop_everything(services, strangers)


def _queue_settings(host: str, folder: Path, state_directory: Path) -> dict[str, str]:
    return {
        "BIND": free_address(host),
        "DATA_BIND": f"{host}:0",
        "SNAPSHOT_FOLDER": f"{folder}/snapshots",
        "SAMPLE_FOLDER": f"{state_directory}/{SAMPLE_FOLDER}",
        # Workers of this user share the service's memory, but other users can reach its port too.
        "USE_CURVE": "true",
        # Most runs on one machine use a small part of it, and its allocation would delay their start.
        "ALLOCATE_AT_START": "false",
    }


def free_address(host: str = "127.0.0.1") -> str:
    """Returns an address of this host that a service finds free when it restarts; see :func:`free_port`."""
    return f"{host}:{free_port(_PORTS, host)}"


@contextmanager
def _files_of_this_user() -> Iterator[None]:
    """Sets a umask under which only this user can read new files, also those of the services."""
    before = os.umask(_UMASK)
    try:
        yield
    finally:
        os.umask(before)


async def _start(service: _Service) -> dict[str, str]:
    prefix = f"SLIPSTREAM_{service.name.upper()}_"
    service.ready_file.unlink(missing_ok=True)
    environment = {
        # Users of this machine may run reward services on it.
        "SLIPSTREAM_ROLLOUT_REWARD_HOSTS": '["localhost", "127.0.0.1"]',
        **os.environ,
        **{prefix + key: value for key, value in service.settings.items()},
        f"{prefix}STOP_ON_STDIN_EOF": "true",
        f"{prefix}READY_FILE": str(service.ready_file),
    }
    process = service.process = await _started_process(service, environment)
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


async def _started_process(service: _Service, environment: Mapping[str, str]) -> _Process:
    prepared, service.prepared = service.prepared, None
    if prepared is not None:
        # If the prepared process has ended, a new process replaces it and logs the reason.
        with suppress(OSError):
            prepared.run(environment, service.log)
            if prepared.returncode is None:
                return prepared
    with service.log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *module_command(f"services.{service.name}"),
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


def _exited(service: _Service) -> ServiceExitedError:
    if shutil.disk_usage(service.log.parent).free < _MIN_FREE_BYTES:  # the log is cut off too
        return ServiceExitedError(
            f"{service.name} ended: the disk of {service.log.parent} is full; free some space, then repeat "
            "the command to resume"
        )
    code = None if service.process is None else service.process.returncode
    return ServiceExitedError(
        f"{service.name} exited with code {code}; its last log lines ({service.log}):\n"
        f"{last_lines(service.log)}"
    )


async def _stop_everything(services: LocalServices, strangers: Sequence[psutil.Process]) -> None:
    """Ends the services, the controller first because it stops its workers; kills the rest.

    Args:
        strangers: Children that this process had before, which are left alone.
    """
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
    child_processes = [child for child in psutil.Process().children() if child not in strangers]
    leftovers = [*child_processes, *(below for child in child_processes for below in _below(child))]
    for leftover in leftovers:
        with suppress(psutil.NoSuchProcess):
            leftover.kill()
    await asyncio.to_thread(psutil.wait_procs, leftovers, timeout=1.0)


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _adopt_orphans() -> None:
    """Becomes the parent of workers whose controller dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
