"""Launcher that runs workers as steps of the Slurm allocation in which the controller runs.

start    places workers on nodes -> writes a plan for each -> srun, one task per process of the worker
task     reads the plan on its node -> address, GPUs, rank -> the worker's process
exit     srun ends with the first failed task, or with the failure of a node
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path

import psutil

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import gpu_hosts, worker_names
from services.common.security.confinement import CodePolicy
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import ExitHandler, LauncherDefaults, WorkerExit
from services.controller.launch.worker_process import (
    REPORTED_LINES,
    ChildProcess,
    adopt,
    last_lines,
    limit_log,
    log_size,
    write_record,
)
from services.controller.manager.launchers import LauncherArgs
from services.extras.slurm.allocation import Allocation, read_allocation
from services.extras.slurm.identity import RunIdentities, write_private
from services.extras.slurm.nodes import ask_nodes, silence
from services.extras.slurm.placement import Node, Placement, PlacementError, Placements
from services.extras.slurm.rules import problems
from services.extras.slurm.settings import SlurmSettings, slurm_environment, step_environment
from services.extras.slurm.shards import Shards, further_nodes
from services.extras.slurm.steps import (
    NODE_FAILURE,
    StepProcess,
    StepRequest,
    Steps,
    srun_command,
    start_srun,
)
from services.extras.slurm.worker_plan import placement_of, worker_plan

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
# Seconds that srun needs to kill the tasks of a step.
_KILL_S = 10.0
# Seconds in which a slurmd accepts a connection, unless its node is lost.
_SILENCE_S = 2.0


class SlurmLauncher(LauncherDefaults):
    """Starts each worker as a step, whose tasks are the worker's processes.

    The steps share the allocation; this launcher gives each worker nodes and GPUs. Workers that an earlier
    controller process started are found through the records of their srun processes and adopted.

    Args:
        nodes: Nodes of the allocation.
        controller_address: ``host:port`` of the controller's gRPC server.
        state_directory: Folder on a file system that all nodes share; each run's logs go to ``RUN/logs``.
        on_exit: Called for workers that ended by themselves.
        allowance: Code and paths that specifications may name; workers check the files themselves.
    """

    def __init__(
        self,
        allocation: Allocation,
        nodes: Sequence[Node],
        settings: SlurmSettings,
        *,
        controller_address: str,
        state_directory: Path,
        on_exit: ExitHandler,
        tasks: TaskGroup,
        allowance: CodePolicy = CodePolicy(),  # noqa: B008 -- frozen
    ) -> None:
        self._allocation = allocation
        self._nodes = {node.name: node for node in nodes}
        self._settings = settings
        self._controller_address = controller_address
        self._state_directory = state_directory
        self._on_exit = on_exit
        self._tasks = tasks
        self._allowance = allowance
        self._placements = Placements(nodes)
        self._steps = Steps(
            [component.job_id for component in allocation.components], step_environment()
        )
        self._processes: dict[str, dict[str, StepProcess]] = {}
        self._absent: dict[str, Mapping[str, str]] = {}
        self._specs: dict[str, RunSpec] = {}
        # Nodes on which a worker did not end when it was killed.
        self._suspects: set[str] = set()
        self._ports = {node.name: cycle(node.ports or (0,)) for node in nodes}
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.identities = RunIdentities(state_directory)

    def problems(self, spec: RunSpec) -> Iterable[str]:
        """Yields reasons why the nodes of this allocation can never run a specification."""
        if rule_problems := [*problems(spec)]:
            return rule_problems
        try:
            Placements([*self._nodes.values()]).assign("", spec)
        except PlacementError as error:
            return [str(error)]
        return []

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Starts the workers of a run that are not running.

        Rollouts in ``later`` start too, and load all that needs no GPU; the later call creates the file that
        they wait for. Rollouts whose node is lost wait until other nodes have room.

        Raises:
            FailedPreconditionError: If a worker that the run needs has no node.
        """
        async with self._starting:
            self._specs[run_id] = spec
            self._logs(run_id).mkdir(parents=True, exist_ok=True)
            running = self._processes.setdefault(run_id, {})
            adopted = self._adopt(run_id, spec, running)
            placements = await self._place(run_id, spec, {*running, *adopted})
            hosts = gpu_hosts(spec)
            for role, worker_id in worker_names(spec):
                gate = self._logs(run_id) / f"{worker_id}.gpus-free"
                if worker_id in hosts and worker_id not in later:
                    gate.touch()
                if worker_id in running or worker_id not in placements:
                    continue
                log_begin = 0
                process = adopted.get(worker_id)
                if process is None:
                    log_begin = log_size(self._logs(run_id) / f"{worker_id}.log")
                    environment = {}
                    if worker_id in later:
                        gate.unlink(missing_ok=True)
                        environment["GPUS_FREE_FILE"] = str(gate)
                    process = await self._spawn(
                        run_id, role, worker_id, placements[worker_id], environment
                    )
                running[worker_id] = process
                self._tasks.create_task(self._watch(run_id, worker_id, process, log_begin))
        async with self._changed:
            self._changed.notify_all()

    def queued(self, run_id: str) -> Collection[str]:
        """Returns the rollouts that wait for a node."""
        return set(self._absent.get(run_id, ()))

    async def admitted(self, run_id: str, worker_ids: Collection[str]) -> Collection[str]:
        """Waits until one of the workers has a node; returns all that have one."""
        names = set(worker_ids)
        async with self._changed:
            await self._changed.wait_for(lambda: names - set(self.queued(run_id)))
        return names - set(self.queued(run_id))

    async def end(self, run_id: str, worker_id: str) -> None:
        """Kills one worker; a node that does not do so gets no further worker if others have room."""
        process = self._processes.get(run_id, {}).pop(worker_id, None)
        process = process or self._unwatched(run_id, worker_id)
        if process is None:
            return
        placement = self._placements.find(run_id, worker_id)
        is_silent = placement is not None and bool(self._suspects & {*placement.nodes})
        if not await process.kill(_SILENCE_S if is_silent else _KILL_S):
            await self._give_up(run_id, [worker_id])

    async def report_lost_hosts(self, run_id: str) -> None:
        """Reports the workers of nodes whose slurmd does not answer; Slurm itself may wait for minutes."""
        running = self._processes.get(run_id, {})
        placements = {name: self._placements.find(run_id, name) for name in running}
        nodes = {node for placement in placements.values() if placement for node in placement.nodes}
        causes_by_node = await asyncio.gather(
            *(silence(self._nodes[name], _SILENCE_S) for name in nodes)
        )
        silent = {name: why for name, why in zip(nodes, causes_by_node, strict=True) if why}
        self._suspects.update(silent)
        for worker_id, placement in placements.items():
            causes = (
                [silent[name] for name in placement.nodes if name in silent] if placement else []
            )
            if causes and worker_id in running:
                # Its srun waits for the node; ``end`` finds the process by its record.
                del running[worker_id]
                self._report(run_id, worker_id, None, causes[0])

    async def stop(self, run_id: str) -> None:
        """Stops all workers of a run with SIGTERM, and kills those that do not end in time."""
        processes = self._processes.pop(run_id, {})
        for record in self._logs(run_id).glob("*.process"):
            if record.stem not in processes and (process := self._unwatched(run_id, record.stem)):
                processes[record.stem] = process
        for process in processes.values():
            process.stop()
        ends = [self._tasks.create_task(process.wait()) for process in processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_GRACE_S)
        alive = [name for name, end in zip(processes, ends, strict=True) if not end.done()]
        if alive:
            logger.warning(
                "workers did not stop in time; killing them",
                extra={"run": run_id, "workers": ", ".join(alive)},
            )
        killed = await asyncio.gather(*(processes[name].kill(_KILL_S) for name in alive))
        await self._give_up(
            run_id, [name for name, is_gone in zip(alive, killed, strict=True) if not is_gone]
        )
        self._placements.release(run_id)
        self._absent.pop(run_id, None)
        self._specs.pop(run_id, None)
        self.identities.remove(run_id)
        for plan in self._logs(run_id).glob("*.plan"):  # it has the run's token
            plan.unlink()
        for waiting in [name for name, absent in self._absent.items() if absent]:
            await self.start(waiting, self._specs[waiting])

    def gpus_for(self, run_id: str) -> int:
        """Returns the number of the allocation's GPUs that the run may use, including its own."""
        return self._placements.available_gpus(run_id)

    def _adopt(
        self, run_id: str, spec: RunSpec, running: Collection[str]
    ) -> dict[str, StepProcess]:
        """Returns the workers that an earlier controller process started and that still run."""
        adopted = {}
        for _, worker_id in worker_names(spec):
            if worker_id not in running and (process := self._unwatched(run_id, worker_id)):
                adopted[worker_id] = process
                placement = placement_of(self._plan(run_id, worker_id), self._nodes)
                self._placements.restore(run_id, worker_id, placement)
        return adopted

    def _unwatched(self, run_id: str, worker_id: str) -> StepProcess | None:
        """Returns the running process of a worker by its record; None if it has ended."""
        srun = adopt(self._record(run_id, worker_id))
        return None if srun is None else StepProcess(srun)

    async def _place(
        self, run_id: str, spec: RunSpec, running: Collection[str]
    ) -> Mapping[str, Placement]:
        present = await self._steps.nodes()
        # If Slurm does not answer, no node counts as lost.
        lost_nodes = set(self._nodes) - present if present else set()
        assign = partial(self._placements.assign, run_id, spec, running=running)
        try:
            try:
                placements, absent = assign(lost_nodes=lost_nodes | self._suspects)
                if absent and self._suspects - lost_nodes:
                    placements, absent = assign(lost_nodes=lost_nodes)
            except PlacementError:
                placements, absent = assign(lost_nodes=lost_nodes)
        except PlacementError as error:
            raise FailedPreconditionError(str(error)) from error
        for worker_id, why in absent.items():
            logger.warning(
                "a rollout has no node", extra={"run": run_id, "worker": worker_id, "why": why}
            )
        self._absent[run_id] = absent
        return placements

    async def _spawn(
        self,
        run_id: str,
        role: str,
        worker_id: str,
        placement: Placement,
        environment: Mapping[str, str],
    ) -> StepProcess:
        first = placement.shares[0].node
        plan = worker_plan(
            role,
            placement,
            settings={
                "ROLE": role,
                "CONTROLLER_ADDRESS": self._controller_address,
                "RUN_ID": run_id,
                "WORKER_ID": worker_id,
                "STATE_DIRECTORY": str(self._state_directory / run_id),
                **self._allowance.settings(),
                **await self.identities.settings(run_id),
                **environment,
            },
            neighbours=self._neighbours(run_id, worker_id),
            num_ranks_on=self._placements.num_ranks(),
            port=next(self._ports[first.name]),
        )
        file = self._plan(run_id, worker_id)
        write_private(file, json.dumps(plan).encode())
        request = StepRequest(
            name=self._step(run_id, worker_id),
            group=self._allocation.components[first.component].group,
            nodes=placement.nodes,
            tasks_per_node=placement.ranks // len(placement.shares),
            module="services.extras.slurm.task",
            arguments=[str(file)],
        )
        process = await start_srun(
            srun_command(
                request, job_id=self._allocation.job_id, extra=self._settings.srun_arguments
            ),
            step_environment(),
            self._logs(run_id) / f"{worker_id}.log",
        )
        try:
            write_record(self._record(run_id, worker_id), [process.pid])
        except psutil.NoSuchProcess:
            logger.warning(
                "worker exited during its start", extra={"run": run_id, "worker": worker_id}
            )
        return StepProcess(ChildProcess(process))

    def _neighbours(self, run_id: str, worker_id: str) -> list[str]:
        """Returns the roles of the run's other workers on the GPUs of a worker."""
        roles = {name: role for role, name in worker_names(self._specs[run_id])}
        return [roles[name] for name in self._placements.workers_sharing(run_id, worker_id)]

    async def _watch(
        self, run_id: str, worker_id: str, process: StepProcess, log_begin: int
    ) -> None:
        """Reports the end of a worker, whose lines begin at an offset of its log."""
        log = self._logs(run_id) / f"{worker_id}.log"
        async with TaskGroup() as tasks:
            limiting = tasks.create_task(limit_log(log))
            code = await process.wait()
            limiting.cancel()
        running = self._processes.get(run_id, {})
        if running.get(worker_id) is not process:
            return
        del running[worker_id]
        lines = last_lines(log, REPORTED_LINES, begin=log_begin)
        # A worker that loses a node also reports the connections that it lost.
        failures = [line for line in lines.splitlines() if NODE_FAILURE in line]
        self._report(
            run_id, worker_id, None if failures else code, failures[0] if failures else lines
        )

    def _report(self, run_id: str, worker_id: str, code: int | None, lines: str) -> None:
        log = self._logs(run_id) / f"{worker_id}.log"
        self._on_exit(
            WorkerExit(
                run_id=run_id, worker_id=worker_id, code=code, last_lines=lines, log=str(log)
            )
        )

    async def _give_up(self, run_id: str, worker_ids: Collection[str]) -> None:
        """Lets Slurm end steps whose srun did not, and avoids their nodes."""
        if not worker_ids:
            return
        for worker_id in worker_ids:
            placement = self._placements.find(run_id, worker_id)
            self._suspects.update(placement.nodes if placement is not None else ())
        await self._steps.cancel({self._step(run_id, name) for name in worker_ids})

    def _step(self, run_id: str, worker_id: str) -> str:
        return f"{run_id}.{worker_id}"

    def _logs(self, run_id: str) -> Path:
        return self._state_directory / run_id / "logs"

    def _record(self, run_id: str, worker_id: str) -> Path:
        return self._logs(run_id) / f"{worker_id}.process"

    def _plan(self, run_id: str, worker_id: str) -> Path:
        return self._logs(run_id) / f"{worker_id}.plan"


@asynccontextmanager
async def open_steps(args: LauncherArgs) -> AsyncIterator[SlurmLauncher]:
    """Opens the launcher ``slurm`` in the allocation of this process.

    Raises:
        FailedPreconditionError: If there is no allocation, or its nodes cannot run workers.
    """
    settings, directory = SlurmSettings(), args.settings.state_directory
    try:
        allocation = await asyncio.to_thread(read_allocation, slurm_environment())
        nodes = await ask_nodes(allocation, settings, directory)
    except SpecError as error:
        raise FailedPreconditionError("\n".join(error.problems)) from error
    launcher = SlurmLauncher(
        allocation,
        nodes,
        settings,
        controller_address=args.address,
        state_directory=directory,
        on_exit=args.manager.drivers.worker_exited,
        tasks=args.tasks,
        allowance=args.settings.allowance,
    )
    shards = Shards(allocation, settings, args.settings)
    further = further_nodes(nodes, args.address) if settings.shards else []
    with shards.identity() if further else nullcontext():
        keeping = [args.tasks.create_task(launcher.identities.keep_renewed())]
        keeping += [args.tasks.create_task(shards.keep(node)) for node in further]
        try:
            yield launcher
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.wait(keeping)
