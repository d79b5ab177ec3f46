"""Worker processes of this host: children, and those that an earlier controller process left running.

A worker is one process, or several that live and die together: its ranks.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from services.common.host import identity_of, is_alive
from services.common.task_group import TaskGroup

# When one process of a worker ended by itself, the others have this long to do the same.
_ENDING_TOGETHER_S = 5.0


class WorkerProcess(Protocol):
    """What was started for a worker."""

    async def wait(self) -> int | None:
        """Wait until it ended; returns its exit status if that is known."""

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is gone."""


class StartedProcess(WorkerProcess, Protocol):
    """One process that this controller started."""

    @property
    def pid(self) -> int:
        """Its id; nobody else has it until ``wait`` returned."""


class ChildProcess:
    """A process that this controller started itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    async def wait(self) -> int | None:
        """Wait until it ended; returns its exit status."""
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is gone."""
        if self._process.returncode is None:
            self._process.send_signal(number)


class AdoptedProcess:
    """A process that another one started, such as an earlier controller: its end is seen, its status not.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._note_end)

    async def wait(self) -> int | None:
        """Wait until it ended; its status is not known."""
        await self._ended.wait()
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is gone."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()


class ProcessGroup:
    """Processes of one worker: when one ends, the others are ended.

    Args:
        processes: At least one.
    """

    def __init__(self, processes: Sequence[WorkerProcess]) -> None:
        self._processes = tuple(processes)

    async def wait(self) -> int | None:
        """Wait until all ended; returns the exit status of the one that ended first."""
        async with TaskGroup() as tasks:
            waits = [tasks.create_task(process.wait()) for process in self._processes]
            ended, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(wait for wait in waits if wait in ended)
            code = first.result()
            # A process that was killed said nothing, and the others may wait for it.
            if others and code is not None and code >= 0:
                await asyncio.wait(others, timeout=_ENDING_TOGETHER_S)
            self.send_signal(signal.SIGKILL)
        return first.result()

    def send_signal(self, number: int) -> None:
        """Send a signal to those that are left."""
        for process in self._processes:
            process.send_signal(number)


def write_record(file: Path, pids: Sequence[int]) -> None:
    """Write down which processes serve a worker.

    Raises:
        psutil.NoSuchProcess: If one of them has ended.
    """
    record = [identity_of(pid) for pid in pids]
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record), encoding="utf-8")
    unfinished.rename(file)


def adopt(file: Path) -> ProcessGroup | None:
    """The processes that were written down, if all of them still run; what is left of others is ended."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        # One may end between the two, which is an OSError.
        alive = [AdoptedProcess(entry["pid"]) for entry in record if is_alive(entry)]
    except (OSError, ValueError):
        return None
    if not alive:
        return None
    group = ProcessGroup(alive)
    if len(alive) < len(record):
        group.send_signal(signal.SIGKILL)
        return None
    return group
