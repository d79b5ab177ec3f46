"""What identifies this host, so that processes on it can use what they share."""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


def host_id() -> str:
    """A short digest of host name and boot: equal for all processes of one host, until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()}:{start}".encode()).hexdigest()[:16]


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path of a socket: its own may be longer than the 107 bytes that an address holds."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


_GROUPS = Path("/sys/fs/cgroup")


def usable_processors(groups: Path = _GROUPS) -> int:
    """Processors that the scheduler and the container's limit leave to this process, at least 1.

    Threads beyond a limit of cgroups do not run beside the others: all of them stand still for the rest of
    each period of 100 ms, and whoever waits for the last one with them.

    Args:
        groups: Where control groups are, of version 1 or 2.
    """
    allowed = len(os.sched_getaffinity(0))
    limit = _limit(groups)
    return allowed if limit is None else max(1, min(allowed, limit))


def _limit(groups: Path) -> int | None:
    """Processors' worth of time in a period, rounded down; None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [(groups / file).read_text(encoding="ascii") for file in files]
        except OSError:
            continue
        quota, period = " ".join(texts).split()
        return None if quota in {"max", "-1"} else int(quota) // int(period)
    return None


def identity_of(pid: int) -> dict[str, Any]:
    """What is written down of a process that lives.

    Raises:
        psutil.NoSuchProcess: If it does not.
    """
    start_time = psutil.Process(pid).create_time()
    return {"host": socket.gethostname(), "pid": pid, "start_time": start_time}


def own_identity() -> dict[str, Any]:
    """What is written down of this process."""
    return identity_of(os.getpid())


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Whether a process of this host still runs."""
    try:
        process = psutil.Process(int(identity["pid"]))
        is_same = process.create_time() == identity["start_time"]
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(identity: Mapping[str, Any]) -> bool:
    """Whether a process ran on this host and has ended; of other hosts nothing is known."""
    return identity["host"] == socket.gethostname() and not is_alive(identity)


def missing_compiler() -> str:
    """What to do where there is no C compiler; empty where one is found.

    Triton, whose kernels torch and the weight plane use, has it make a launcher for each of them at run time.
    It takes ``CC``, else gcc or clang.
    """
    compiler = os.environ.get("CC")
    if shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"):
        return ""
    found = f"CC is {compiler!r}, which is no program here" if compiler else "none was found"
    return (
        f"kernels for GPUs need a C compiler, but {found}; install gcc or clang and the headers of "
        "Python, or set CC"
    )


def missing_cxx_compiler() -> str:
    """Return what to do if there is no C++ compiler; empty if one is found.

    torch.compile makes C++ of layers that run on a CPU. It takes ``CXX``, else g++.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"on a CPU torch.compile needs a C++ compiler, but {compiler!r} is no program here; install g++, set "
        "CXX, or set trainer.compile to false"
    )
