"""Facts about this host: its clock, identity, ports, processors, processes, compilers and private files."""

import hashlib
import os
import random
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Protocol

import psutil


class Clock(Protocol):
    """Source of the current time, which tests can control. The module ``time`` is the clock of the host."""

    def time(self) -> float:
        """Returns seconds since the epoch."""

    def monotonic(self) -> float:
        """Returns seconds that never decrease."""


HOST_KILLS: Final = Path("/proc/vmstat")
_EPOCH = time.time() - time.monotonic()


def steady_time() -> float:
    """Returns seconds since the epoch that no change of the host's clock affects while this process runs."""
    return _EPOCH + time.monotonic()


def host_id() -> str:
    """Returns a short digest of host name and boot: equal for all processes of one host, until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()}:{start}".encode()).hexdigest()[:16]


def host_bytes_here() -> int:
    """Returns the bytes of memory available on this machine or in its container."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return int(total)
    return min(total, int(limit)) if limit.isdecimal() else int(total)


def oom_kill_file(
    memberships: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> Path:
    """Returns the file that counts the processes that the kernel killed because memory was short.

    It counts those of this process's control group or, if that is unknown, of the host (:data:`HOST_KILLS`).
    """
    lines = memberships.read_text(encoding="utf-8").splitlines() if memberships.exists() else []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        # Only version 2 has a hierarchy without named controllers; version 1 mounts each one separately.
        name = "memory.oom_control" if controllers else "memory.events.local"
        file = mounts / controllers / group.lstrip("/") / name
        if file.exists():
            return file
    return HOST_KILLS


def num_oom_kills(file: Path) -> int:
    """Returns the count of :func:`oom_kill_file`; 0 if unknown."""
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a short alias of a socket's path: a socket address holds at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that readers, and a restart after a crash, see the old or the new content."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def ip_of(name: str) -> str:
    """Returns the first IPv4 address of a host name, or an address as it is; empty if there is none."""
    with suppress(ValueError):
        return str(ip_address(name.strip("[]")))
    with suppress(OSError):
        return socket.gethostbyname(name)
    return ""


def interface_of(address: str) -> str:
    """Returns the name of the network interface with an IP address of this host; empty if there is none."""
    if not address:
        return ""
    loopback = ip_address(address).is_loopback
    for name, addresses in psutil.net_if_addrs().items():
        for candidate in addresses:
            host_address = candidate.address.partition("%")[0]
            if host_address == address or (loopback and host_address in {"127.0.0.1", "::1"}):
                return name
    return ""


_PORTS_TRIED = 100


def free_port(ports: range, host: str = "127.0.0.1") -> int:
    """Returns a random port of a range that is free at an address; 0 if the ports that were tried are in use.

    A process may listen on the port later, or again after a restart, if the range is below Linux' ephemeral
    ports: the kernel gives those to any process that connects or binds port 0.
    """
    for port in random.sample(ports, _PORTS_TRIED):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    return 0


_GROUPS = Path("/sys/fs/cgroup")


def usable_processors(groups: Path = _GROUPS) -> int:
    """Returns the processors that affinity and the container's limit leave to this process, at least 1.

    Threads beyond a cgroup limit do not run in parallel: all of them are throttled for the rest of
    each period of 100 ms, and work that waits for the last one waits, too.

    Args:
        groups: Root of the control groups, of version 1 or 2.
    """
    allowed = len(os.sched_getaffinity(0))
    limit = _limit(groups)
    return allowed if limit is None else max(1, min(allowed, limit))


def _limit(groups: Path) -> int | None:
    """Returns the CPU limit in processors, rounded down; None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [(groups / file).read_text(encoding="ascii") for file in files]
        except OSError:
            continue
        quota, period = " ".join(texts).split()
        return None if quota in {"max", "-1"} else int(quota) // int(period)
    return None


def identity_of(pid: int) -> dict[str, Any]:
    """Returns host, pid and start time, which identify a running process.

    Raises:
        psutil.NoSuchProcess: If it does not run.
    """
    start_time = psutil.Process(pid).create_time()
    return {"host": socket.gethostname(), "pid": pid, "start_time": start_time}


def process_identity() -> dict[str, Any]:
    return identity_of(os.getpid())


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Returns True if a process of this host still runs."""
    try:
        process = psutil.Process(int(identity["pid"]))
        is_same = process.create_time() == identity["start_time"]
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(identity: Mapping[str, Any]) -> bool:
    """Returns True if a process ran on this host and has ended; False for processes of other hosts."""
    return identity["host"] == socket.gethostname() and not is_alive(identity)


def missing_compiler() -> str:
    """Returns the fix if there is no C compiler; empty if one is found.

    Triton, whose kernels torch and weight synchronization use, compiles a launcher for each kernel
    at run time, with ``CC`` or else gcc or clang.
    """
    compiler = os.environ.get("CC")
    if shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"):
        return ""
    cause = (
        f"CC is {compiler!r}, which is not an executable program" if compiler else "none was found"
    )
    return (
        f"GPU kernels need a C compiler, but {cause}; install gcc or clang and the headers of "
        "Python, or set CC"
    )


PRIVATE_MODE: Final = 0o600


def make_private_folder(path: Path) -> None:
    """Creates a folder and its missing parents for this user alone, whatever the umask is."""
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)


def make_private(path: Path) -> None:
    """Creates a file if it is missing, and takes the rights of other users, whatever the umask is.

    SQLite gives its journals the mode of the database.
    """
    with suppress(OSError):  # of another user, or read-only: whoever opens it reports the reason
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE))
        for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
            if file.exists() and file.stat().st_mode & 0o077:
                file.chmod(PRIVATE_MODE)
