"""Worker processes of this host: child processes, and those adopted from an earlier controller.

A worker is one process, or several ranks; when one rank ends, the others are ended.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from services.common.host import identity_of, is_alive, write_atomically
from services.common.task_group import TaskGroup

# When one process of a worker has ended by itself, the others have this many seconds to end.
_ENDING_TOGETHER_S = 5.0


class WorkerProcess(Protocol):
    """Process or processes of one worker."""

    async def wait(self) -> int | None:
        """Waits until it has ended; returns its exit status, or None if unknown."""

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if it is gone."""


class StartedProcess(WorkerProcess, Protocol):
    """One process that this controller started."""

    @property
    def pid(self) -> int:
        """Process id; the kernel does not reuse it until ``wait`` has returned."""


class ChildProcess:
    """Direct child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int | None:
        """Waits until it has ended; returns its exit status."""
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


class AdoptedProcess:
    """Process that another process started, such as an earlier controller; its exit status stays unknown."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._note_end)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return None

    def send_signal(self, number: int) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()


class ProcessGroup:
    """Processes of one worker; when one ends, the others are ended."""

    def __init__(self, processes: Sequence[WorkerProcess]) -> None:
        self._processes = tuple(processes)
        self.first_rank: int | None = None
        """Rank of the process that ended first; None before, and if there is one process only."""

    async def wait(self) -> int | None:
        """Waits until all have ended; returns the exit status of the one that ended first."""
        async with TaskGroup() as tasks:
            waits = [tasks.create_task(process.wait()) for process in self._processes]
            first_waits, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(wait for wait in waits if wait in first_waits)
            code = first.result()
            if pending:
                self.first_rank = waits.index(first)
            # If the first one was killed, the others may block on it without a message, so this does not
            # wait for them.
            if pending and code is not None and code >= 0:
                await asyncio.wait(pending, timeout=_ENDING_TOGETHER_S)
            self.send_signal(signal.SIGKILL)
        return first.result()

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def write_record(file: Path, pids: Sequence[int]) -> None:
    """Records the processes of a worker in a file.

    Raises:
        psutil.NoSuchProcess: If one of them has ended.
    """
    write_atomically(file, json.dumps([identity_of(pid) for pid in pids]))


def adopt(file: Path) -> ProcessGroup | None:
    """Adopts the recorded processes if all of them still run; otherwise kills the remaining ones."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        # ``AdoptedProcess`` raises OSError if the process ends after the check ``is_alive``.
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


class MetricTargets:
    """Assigns each worker a port for its metrics and lists them in a ``file_sd_configs`` file.

    Args:
        file: The file; None assigns no ports. Entries of an earlier process are kept.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._ports: dict[tuple[str, str], int] = {}
        if file is not None and file.exists():
            for entry in json.loads(file.read_text(encoding="utf-8")):
                labels, port = entry["labels"], int(entry["targets"][0].rpartition(":")[2])
                self._ports[labels["run"], labels["pod"]] = port

    def add(self, run_id: str, worker_id: str) -> int:
        """Assigns a free port to a worker that starts; returns 0 without a file."""
        if self._file is None:
            return 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        self._ports[run_id, worker_id] = port
        self._write()
        return port

    def remove(self, run_id: str) -> None:
        self._ports = {key: port for key, port in self._ports.items() if key[0] != run_id}
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        # The same labels as in a cluster, because the dashboards select by them.
        entries = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"run": run_id, "pod": worker_id}}
            for (run_id, worker_id), port in self._ports.items()
        ]
        # Replaced atomically, so that Prometheus never reads half a file.
        new_file = self._file.with_name(f"{self._file.name}.new")
        new_file.write_text(json.dumps(entries), encoding="utf-8")
        new_file.replace(self._file)


_LAST_LINES = 15
REPORTED_LINES = 1000
"""Lines of a log in which the first cause of a failure is looked for: engines print long tracebacks."""
_BLOCK_BYTES = 1 << 16
MAX_LOG_BYTES = 32 << 20
"""A larger log is emptied, so that no worker fills the controller's disk."""
_LOG_EVERY_S = 10.0


async def limit_log(log: Path) -> None:
    """Empties a worker's log whenever it exceeds ``MAX_LOG_BYTES``; runs until cancelled."""
    while True:
        # Polled, because asyncio does not report that a file grows.
        await asyncio.sleep(_LOG_EVERY_S)
        await asyncio.to_thread(_empty_if_large, log)


def _empty_if_large(log: Path) -> None:
    with suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_BYTES:
            empty_log(log)


def empty_log(log: Path) -> None:
    """Copies a log to ``<log>.1`` and then empties it. Lines that are written in between are lost."""
    with suppress(OSError):  # on a full disk, the log is emptied without a copy
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)


def log_size(log: Path) -> int:
    """Returns the size of a log in bytes; 0 if the file does not exist."""
    return log.stat().st_size if log.exists() else 0


def last_lines(
    log: Path, count: int = _LAST_LINES, *, max_bytes: int = 1 << 16, begin: int = 0
) -> str:
    """Returns the last lines of a log file of any size; empty if the file does not exist.

    Args:
        max_bytes: Max bytes to read; of a longer line only the end is returned.
        begin: Offset of the first line; ignored if the log was emptied since and is shorter.
    """
    if not log.exists():
        return ""
    blocks: list[bytes] = []
    num_ends = 0
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        first, begin = max(size - max_bytes, begin if begin <= size else 0), size
        # Reads one more line end than lines, so that the first returned line is complete.
        while begin > first and num_ends <= count:
            end, begin = begin, max(begin - _BLOCK_BYTES, first)
            file.seek(begin)
            blocks.append(file.read(end - begin))
            num_ends += blocks[-1].count(b"\n")
    data = b"".join(reversed(blocks))
    return b"\n".join(data.rstrip().split(b"\n")[-count:]).decode(errors="replace")
