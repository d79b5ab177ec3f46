"""Runs workers as processes of this host."""

import asyncio
import logging
import os
import sys
from collections import deque
from pathlib import Path

from services.common.spec.run import RunSpec
from services.controller.client import WorkerRole
from services.controller.launcher import ExitHandler, WorkerExit, worker_names

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.5
_LAST_LINES = 15


class ProcessLauncher:
    """Starts each worker as ``python -m services.<role>`` in a session of its own.

    Args:
        controller_address: ``host:port`` of the controller's gRPC server.
        state_directory: Each run's logs go to ``<state_directory>/<run_id>/logs``.
        on_exit: Hears of workers that ended by themselves.
        tasks: Owns the tasks that watch the processes.
    """

    def __init__(
        self,
        *,
        controller_address: str,
        state_directory: Path,
        on_exit: ExitHandler,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._controller_address = controller_address
        self._state_directory = state_directory
        self._on_exit = on_exit
        self._tasks = tasks
        self._processes: dict[str, dict[str, asyncio.subprocess.Process]] = {}

    async def start(self, run_id: str, spec: RunSpec) -> None:
        """Start all workers of a run."""
        logs = self._state_directory / run_id / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._processes[run_id] = {}
        names = worker_names(spec)
        for role, worker_id in names:
            await self._start_worker(run_id, role, worker_id, logs, num_workers=len(names))

    async def stop(self, run_id: str) -> None:
        """Stop all workers of a run: asked first, killed after a grace period."""
        processes = self._processes.pop(run_id, {})
        for process in processes.values():
            if process.returncode is None:
                process.terminate()
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*(process.wait() for process in processes.values()))
        except TimeoutError:
            for worker_id, process in processes.items():
                if process.returncode is None:
                    logger.warning("worker did not stop and is killed", extra={"worker": worker_id})
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes.values()))

    async def _start_worker(
        self, run_id: str, role: WorkerRole, worker_id: str, logs: Path, *, num_workers: int
    ) -> None:
        prefix = f"SLIPSTREAM_{role.upper()}_"
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            f"{prefix}CONTROLLER_ADDRESS": self._controller_address,
            f"{prefix}RUN_ID": run_id,
            f"{prefix}WORKER_ID": worker_id,
            f"{prefix}STATE_DIRECTORY": str(self._state_directory / run_id),
        }
        log = logs / f"{worker_id}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{role}",
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[run_id][worker_id] = process
        self._tasks.create_task(self._watch(run_id, worker_id, process, log))

    async def _watch(
        self, run_id: str, worker_id: str, process: asyncio.subprocess.Process, log: Path
    ) -> None:
        code = await process.wait()
        if self._processes.get(run_id, {}).get(worker_id) is process:
            self._on_exit(
                WorkerExit(
                    run_id=run_id, worker_id=worker_id, code=code, last_lines=last_lines(log)
                )
            )


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """The end of a log file."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(deque(lines, maxlen=count)).rstrip()
