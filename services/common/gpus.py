"""Memory of this host's GPUs and the processes that hold it, as nvidia-smi reports them."""

import os
import pwd
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_GB = 1e9
_TIMEOUT_S = 10.0
_MAX_NAMED = 4
TOLERANCE_BYTES = 2 * _GB
"""Memory of other programs, such as a desktop, for which a memory plan has room."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Process that holds memory of a GPU."""

    pid: int
    name: str
    num_bytes: int | None
    """None if the driver does not report it."""

    def __str__(self) -> str:
        size = "" if self.num_bytes is None else f", {self.num_bytes / _GB:.1f} GB"
        return f"{self.name} (pid {self.pid}{_user_of(self.pid)}{size})"


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes."""

    index: int
    uuid: str
    total: int
    free: int
    processes: tuple[GpuProcess, ...] = ()

    def shortage(self, needed_bytes: float) -> str:
        """Returns why a program cannot start on this GPU, and who holds the memory; empty if it can.

        Args:
            needed_bytes: Bytes that the program needs.
        """
        if self.free + TOLERANCE_BYTES >= min(needed_bytes, self.total):
            return ""
        return (
            f"GPU {self.index} has {self.free / _GB:.1f} of its {self.total / _GB:.1f} GB free, but "
            f"{min(needed_bytes, self.total) / _GB:.1f} GB are needed; the rest is held by {self._holders()}"
        )

    def _holders(self) -> str:
        largest = sorted(self.processes, key=lambda process: -(process.num_bytes or 0))
        names = [str(process) for process in largest[:_MAX_NAMED]]
        if not names:
            return "processes outside of this container, which nvidia-smi on the host lists"
        if num_further := len(largest) - len(names):
            names.append(f"{num_further} more")
        return ", ".join(names)


def gpu_memory() -> list[GpuMemory]:
    """Returns the memory of all GPUs of this host; empty if nvidia-smi does not report it."""
    gpus = _query("--query-gpu=index,uuid,memory.total,memory.free")
    if not gpus:
        return []
    users = _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    try:
        return [
            GpuMemory(
                int(index), uuid, int(total) << 20, int(free) << 20, tuple(_processes(uuid, users))
            )
            for index, uuid, total, free in gpus
        ]
    except ValueError:
        return []


def visible_gpus(names: Sequence[str], gpus: Sequence[GpuMemory]) -> dict[str, GpuMemory]:
    """Maps names of GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them, to their memory; omits unknown ones."""
    return {
        name: gpu
        for name in names
        for gpu in gpus
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    }


def _processes(uuid: str, users: Sequence[Sequence[str]]) -> Iterator[GpuProcess]:
    for gpu, pid, name, mebibytes in users:
        if gpu == uuid and pid.isdecimal() and int(pid) != os.getpid():
            size = int(mebibytes) << 20 if mebibytes.isdecimal() else None
            yield GpuProcess(int(pid), name.rpartition("/")[2], size)


def _query(question: str) -> list[list[str]]:
    """Returns the rows of nvidia-smi's answer; empty if it does not answer or a row is incomplete."""
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    try:
        query = subprocess.run(  # noqa: S603 -- no argument comes from a user
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    num_columns = question.count(",") + 1
    rows = [line.split(", ") for line in query.stdout.splitlines()]
    return rows if all(len(row) == num_columns for row in rows) else []


def _user_of(pid: int) -> str:
    try:
        return f" of {pwd.getpwuid(Path(f'/proc/{pid}').stat().st_uid).pw_name}"
    except (OSError, KeyError):
        return ""
