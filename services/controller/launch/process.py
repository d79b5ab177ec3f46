"""Launcher that runs workers as processes of this host."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import psutil

from services.common.errors import FailedPreconditionError
from services.common.host import (
    HOST_KILLS,
    free_port,
    num_oom_kills,
    oom_kill_file,
    usable_processors,
)
from services.common.parent import module_command
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import gpu_hosts, gpu_needs, worker_names
from services.common.runspec.workers import WORKERS
from services.common.security.confinement import CodePolicy
from services.common.security.credentials import current_identity
from services.common.task_group import TaskGroup
from services.controller.launch import fork_client
from services.controller.launch.fork_client import ForkServer, open_fork_server
from services.controller.launch.gpus import HostGpus, host_gpus
from services.controller.launch.launcher import ExitHandler, LauncherDefaults, WorkerExit
from services.controller.launch.worker_process import (
    REPORTED_LINES,
    ChildProcess,
    MetricTargets,
    ProcessGroup,
    StartedProcess,
    adopt,
    last_lines,
    limit_log,
    log_size,
    write_record,
)

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.5
# Between the ports of well-known services and Linux' ephemeral ports.
_RENDEZVOUS_PORTS = range(20_000, 32_000)


class ProcessLauncher(LauncherDefaults):
    """Starts each worker as ``python -m services.<program>`` in its own session, or as an equivalent fork.

    A worker of several ranks has one process per rank; they meet on loopback, as under
    ``torchrun``. Each worker has its own GPUs as long as the host has enough. Workers that an
    earlier controller process started are found through its records and adopted.

    Args:
        controller_address: ``host:port`` of the controller's gRPC server.
        state_directory: Root of the logs: each run's go to ``<state_directory>/<run_id>/logs``.
        on_exit: Called for workers that ended by themselves.
        allowance: Code and paths that specifications may name; workers check the files themselves.
        forks: Starts processes whose imports are done; None starts every process from scratch.
        metric_targets: File with the metrics endpoints for Prometheus; None disables the workers'
            metrics.
    """

    def __init__(
        self,
        *,
        controller_address: str,
        state_directory: Path,
        on_exit: ExitHandler,
        tasks: TaskGroup,
        allowance: CodePolicy = CodePolicy(),  # noqa: B008 -- frozen
        gpus: Sequence[str] = (),
        forks: ForkServer | None = None,
        metric_targets: Path | None = None,
    ) -> None:
        self._controller_address = controller_address
        self._state_directory = state_directory
        self._on_exit = on_exit
        self._tasks = tasks
        self._allowance = allowance
        self._processes: dict[str, dict[str, ProcessGroup]] = {}
        self._gpus = HostGpus(gpus)
        self._forks = forks
        self._metrics = MetricTargets(metric_targets)

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Starts the workers of a run that are not running.

        Rollouts in ``later`` start too, and load all that needs no GPU; the later call creates the
        file that they wait for.
        """
        self._logs(run_id).mkdir(parents=True, exist_ok=True)
        running = self._processes.setdefault(run_id, {})
        names = worker_names(spec)
        ranks = {worker_id: WORKERS[role].ranks(spec) for role, worker_id in names}
        gpus, hosts = self._assign_gpus(run_id, spec), gpu_hosts(spec)
        for role, worker_id in names:
            gate = self._logs(run_id) / f"{worker_id}.gpus-free"
            if worker_id in hosts and worker_id not in later:
                gate.touch()
            if worker_id in running:
                continue
            log_begin = 0
            process: ProcessGroup | None = adopt(self._record(run_id, worker_id))
            if process is None:
                log_begin = log_size(self._logs(run_id) / f"{worker_id}.log")
                environment = {
                    "OMP_NUM_THREADS": str(max(1, usable_processors() // sum(ranks.values()))),
                    **_inherited(),
                    "CUDA_VISIBLE_DEVICES": ",".join(gpus[worker_id]),
                    **self._identity(run_id, role, worker_id),
                    **self._neighbours(run_id, role, worker_id, names),
                    **_engine_to_import(spec, role, gpus[worker_id]),
                }
                if worker_id in later:
                    gate.unlink(missing_ok=True)
                    environment[f"{WORKERS[role].settings_prefix}GPUS_FREE_FILE"] = str(gate)
                process = await self._spawn(
                    run_id, role, worker_id, ranks=ranks[worker_id], environment=environment
                )
            running[worker_id] = process
            self._tasks.create_task(self._watch(run_id, worker_id, process, log_begin))

    def _assign_gpus(self, run_id: str, spec: RunSpec) -> Mapping[str, Sequence[str]]:
        """Assigns GPUs to each worker.

        Raises:
            FailedPreconditionError: If a new rollout would share a GPU with a running one whose
                engine has taken the free memory that it found at its start.
        """
        needs, running = gpu_needs(spec), self._processes[run_id].keys()
        new = self._gpus.unassigned_workers(run_id, needs)
        gpus = self._gpus.assign(run_id, needs, hosts=gpu_hosts(spec))
        rollouts = {worker_id for role, worker_id in worker_names(spec) if role == "rollout"}
        unsized = engine_kind(spec.rollout.engine).missing_bounds(spec.rollout.engine_arguments)
        for worker_id in sorted(new & rollouts) if unsized else ():
            for neighbour in (
                running & rollouts & set(self._gpus.workers_sharing(run_id, worker_id))
            ):
                self._gpus.release_unstarted(run_id, new)
                arguments = " and ".join(f"rollout.engine_arguments.{name}" for name in unsized)
                raise FailedPreconditionError(
                    f"{worker_id} cannot share GPU {', '.join(gpus[neighbour])} with {neighbour}, whose "
                    f"engine uses its free memory: this host has {self._gpus.count} GPUs, and the run's "
                    f"workers need {sum(needs.values())}; submit or fork the run with {arguments} set, or "
                    "with this number of rollouts from the start, or use a larger host"
                )
        return gpus

    async def end(self, run_id: str, worker_id: str) -> None:
        process = self._processes.get(run_id, {}).pop(worker_id, None)
        # A worker that an earlier controller started may not be adopted yet.
        process = process or adopt(self._record(run_id, worker_id))
        if process is not None:
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def gpus_for(self, run_id: str) -> int:
        """Returns the number of this host's GPUs that the run may use, including its own."""
        return self._gpus.available_to(run_id)

    async def stop(self, run_id: str) -> None:
        """Stops all workers of a run with SIGTERM, and with SIGKILL after a grace period."""
        processes = self._processes.pop(run_id, {})
        self._gpus.release(run_id)
        self._metrics.remove(run_id)
        for record in self._logs(run_id).glob("*.process"):
            if record.stem not in processes and (adopted := adopt(record)) is not None:
                processes[record.stem] = adopted
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        waits = [process.wait() for process in processes.values()]
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*waits)
        except TimeoutError:
            logger.warning("workers did not stop in time; killing them", extra={"run": run_id})
            for process in processes.values():
                process.send_signal(signal.SIGKILL)
            await asyncio.gather(*(process.wait() for process in processes.values()))

    def _identity(self, run_id: str, role: str, worker_id: str) -> dict[str, str]:
        prefix = WORKERS[role].settings_prefix
        return {
            f"{prefix}ROLE": role,
            f"{prefix}CONTROLLER_ADDRESS": self._controller_address,
            f"{prefix}RUN_ID": run_id,
            f"{prefix}WORKER_ID": worker_id,
            f"{prefix}METRICS_PORT": str(self._metrics.add(run_id, worker_id)),
            f"{prefix}STATE_DIRECTORY": str(self._state_directory / run_id),
            f"{prefix}RUN_TOKEN": current_identity().token_for(run_id),
            **{f"{prefix}{name}": value for name, value in self._allowance.settings().items()},
        }

    def _neighbours(
        self, run_id: str, role: str, worker_id: str, names: Sequence[tuple[str, str]]
    ) -> dict[str, str]:
        """Returns the environment variable with the roles of other workers on the same GPUs.

        The worker's engine leaves memory for them. Empty if there are no such workers.
        """
        roles = {worker: worker_role for worker_role, worker in names}
        neighbour_workers = self._gpus.workers_sharing(run_id, worker_id)
        if not neighbour_workers:
            return {}
        neighbours = [roles[worker] for worker in neighbour_workers if worker in roles]
        return {f"{WORKERS[role].settings_prefix}GPU_NEIGHBOURS": json.dumps(neighbours)}

    async def _spawn(
        self, run_id: str, role: str, worker_id: str, *, ranks: int, environment: Mapping[str, str]
    ) -> ProcessGroup:
        processes: list[StartedProcess] = []
        try:
            for rank_environment in _places(ranks):
                process = await self._start_process(
                    WORKERS[role].module,
                    {**environment, **rank_environment},
                    self._logs(run_id) / f"{worker_id}.log",
                )
                processes.append(process)
        except BaseException:
            # A start may be cancelled while it waits, and no other code would end these processes.
            for process in processes:
                process.send_signal(signal.SIGKILL)
            raise
        try:
            write_record(self._record(run_id, worker_id), [process.pid for process in processes])
        except psutil.NoSuchProcess:
            logger.warning(
                "worker exited during its start", extra={"run": run_id, "worker": worker_id}
            )
        return ProcessGroup(processes)

    async def _start_process(
        self, module: str, environment: Mapping[str, str], log: Path
    ) -> StartedProcess:
        if self._forks is not None:
            forked = await self._forks.start(module, environment, log)
            if forked is not None:
                return forked
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *module_command(module),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return ChildProcess(process)

    async def _watch(
        self, run_id: str, worker_id: str, process: ProcessGroup, log_begin: int
    ) -> None:
        """Reports the end of a worker, whose lines begin at an offset of its log."""
        log = self._logs(run_id) / f"{worker_id}.log"
        kills = oom_kill_file()
        num_before = num_oom_kills(kills)
        async with TaskGroup() as tasks:
            limiting = tasks.create_task(limit_log(log))
            code = await process.wait()
            limiting.cancel()
        running = self._processes.get(run_id, {})
        if running.get(worker_id) is not process:
            return
        del running[worker_id]
        self._on_exit(
            WorkerExit(
                run_id=run_id,
                worker_id=worker_id,
                code=code,
                last_lines=last_lines(log, REPORTED_LINES, begin=log_begin),
                log=str(log),
                rank=process.first_rank,
                num_oom_kills=num_oom_kills(kills) - num_before,
                are_kills_of_host=kills == HOST_KILLS,
            )
        )

    def _logs(self, run_id: str) -> Path:
        return self._state_directory / run_id / "logs"

    def _record(self, run_id: str, worker_id: str) -> Path:
        return self._logs(run_id) / f"{worker_id}.process"


@asynccontextmanager
async def gpus_and_forks() -> AsyncIterator[tuple[Sequence[str], ForkServer | None]]:
    """Yields this process's GPUs and, on Linux, a fork server with its imports done."""
    forks = open_fork_server(_inherited()) if sys.platform == "linux" else nullcontext()
    gpus = host_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    async with forks as fork_server:
        yield gpus, fork_server


def _engine_to_import(spec: RunSpec, role: str, gpus: Sequence[str]) -> dict[str, str]:
    """Returns the environment variable with which a rollout imports its engine before it reads its run.

    Empty for a batch-invariant engine: its import needs other variables, which follow from the specification.
    """
    if role != "rollout" or not gpus or spec.rollout.reproducible == "batch_invariant":
        return {}
    return {f"{WORKERS[role].settings_prefix}ENGINE": spec.rollout.engine}


def begin_imports() -> None:
    """Starts the fork server, which imports the workers' modules, before a launcher opens (Linux only)."""
    if sys.platform == "linux":
        fork_client.begin_imports(_inherited())


def _inherited() -> dict[str, str]:
    """Returns this process's environment without the controller's settings.

    The settings contain the controller's key and its database's password.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLIPSTREAM_CONTROLLER_")
    }


def _places(ranks: int) -> list[dict[str, str]]:
    """Returns the environment variables of ``torchrun`` for each rank of a worker; empty for a single one."""
    if ranks == 1:
        return [{}]
    meeting = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_rendezvous_port()),
    }
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _rendezvous_port() -> int:
    """Returns a free port that no other process takes by chance before rank 0 listens on it.

    Rank 0 listens after seconds, or after a minute on a busy host. Until then, the kernel may give a port of
    its ephemeral range to any process that connects or binds port 0. The returned port is below that range
    if one of the tried ports is free.
    """
    if port := free_port(_RENDEZVOUS_PORTS):
        return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
