"""Steps of the allocation: the srun process of each worker, and the end of steps whose srun is gone."""

import asyncio
import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.parent import module_command
from services.controller.launch.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_COMMAND_S = 30.0
_SIGNALLED = 128
"""srun and shells exit with this number plus the signal that ended a task."""
NODE_FAILURE = "Node failure on"
"""Beginning of srun's message about a node that Slurm gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Nodes and tasks of a step."""

    name: str
    group: int | None
    """Component of a heterogeneous job; None outside of one."""
    nodes: Sequence[str]
    tasks_per_node: int
    module: str
    arguments: Sequence[str]


def srun_command(request: StepRequest, *, job_id: str, extra: Sequence[str] = ()) -> list[str]:
    """Returns the command of a step that shares processors, memory and GPUs with the job's other steps.

    Each worker uses only the GPUs that the launcher gave to it.
    """
    group = [] if request.group is None else [f"--het-group={request.group}"]
    return [
        "srun",
        f"--jobid={job_id}",
        *group,
        "--overlap",
        # A worker with a GPU for each rank may have fewer processors than ranks.
        "--overcommit",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        "--unbuffered",
        # The other ranks of a failed one block on it.
        "--kill-on-bad-exit=1",
        "--wait=30",
        "--export=ALL",
        f"--job-name={request.name}",
        f"--nodelist={','.join(request.nodes)}",
        f"--nodes={len(request.nodes)}",
        f"--ntasks={len(request.nodes) * request.tasks_per_node}",
        f"--ntasks-per-node={request.tasks_per_node}",
        *extra,
        *module_command(request.module, *request.arguments),
    ]


async def start_srun(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> asyncio.subprocess.Process:
    """Starts srun in a separate session, with the output of its tasks in a log."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


class StepProcess:
    """A worker as its srun process.

    Args:
        process: The srun process, which forwards SIGUSR2 to the tasks and kills them at SIGTERM.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def wait(self) -> int | None:
        """Waits until the step has ended; returns its exit status, negative for a signal."""
        code = await self._process.wait()
        return code if code is None or code <= _SIGNALLED else _SIGNALLED - code

    def stop(self) -> None:
        """Asks the worker to stop."""
        self._process.send_signal(signal.SIGUSR2)

    async def kill(self, timeout_s: float) -> bool:
        """Kills the worker; returns False if its step may go on, because a node does not answer in time."""
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
            return False
        return True


class Steps:
    """Running steps of the job, by their names.

    Args:
        job_ids: The job, or the jobs of the components of a heterogeneous one.
        environment: Environment of Slurm's commands.
    """

    def __init__(self, job_ids: Sequence[str], environment: Mapping[str, str]) -> None:
        self._jobs = ",".join(job_ids)
        self._environment = environment

    async def cancel(self, names: Collection[str]) -> None:
        """Kills the steps with these names, such as those that a killed srun left."""
        listing = await self._output(
            "squeue", "--steps", f"--jobs={self._jobs}", "-h", "-o", "%i %j"
        )
        for line in listing.splitlines():
            step, _, name = line.strip().partition(" ")
            if name in names:
                logger.info(
                    "killing a step that has no srun", extra={"step": step, "step_name": name}
                )
                await self._output("scancel", "--signal=KILL", step)

    async def nodes(self) -> set[str]:
        """Returns the nodes that the job has; Slurm removes those that fail."""
        listing = await self._output("squeue", f"--jobs={self._jobs}", "-h", "-o", "%N")
        hosts = await asyncio.gather(
            *(
                self._output("scontrol", "show", "hostnames", line.strip())
                for line in listing.splitlines()
                if line.strip()
            )
        )
        return {node for text in hosts for node in text.split()}

    async def _output(self, *command: str) -> str:
        """Returns the output of a command of Slurm; empty if it fails, which is logged."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                output, error_output = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            output, error_output = b"", b"no answer in time"
        if process.returncode:
            why = error_output.decode(errors="replace").strip()
            logger.warning("a command of Slurm failed", extra={"command": command[0], "why": why})
            return ""
        return output.decode()
