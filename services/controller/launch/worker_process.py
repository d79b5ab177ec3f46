"""Worker processes of this host: children, and those that an earlier controller process left running."""

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil


class WorkerProcess(Protocol):
    """A process that was started for a worker."""

    pid: int

    async def wait(self) -> int | None:
        """Wait until it ended; returns its exit status if that is known."""

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is gone."""


class ChildProcess:
    """A process that this controller started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int | None:
        """Wait until it ended; returns its exit status."""
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is gone."""
        if self._process.returncode is None:
            self._process.send_signal(number)


class AdoptedProcess:
    """A process that an earlier controller started: its end is seen, its status is not.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
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
            signal.pidfd_send_signal(self._descriptor, number)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Identifies a process for a later controller: process ids are used again, start times are not."""

    pid: int
    start_time: float


def write_record(file: Path, pid: int) -> None:
    """Write down which process serves a worker."""
    record = {"pid": pid, "start_time": psutil.Process(pid).create_time()}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record), encoding="utf-8")
    unfinished.rename(file)


def adopt(file: Path) -> AdoptedProcess | None:
    """The process that was written down, if it still runs."""
    try:
        record = ProcessRecord(**json.loads(file.read_text(encoding="utf-8")))
        process = psutil.Process(record.pid)
        is_same = process.create_time() == record.start_time
        if not is_same or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return AdoptedProcess(record.pid)
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
