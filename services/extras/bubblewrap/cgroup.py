"""Limits the memory and the tasks (processes and their threads) of a sandbox by cgroups.

Only a cgroup counts memory that no process maps: buffers of sockets and pipes, page tables, files in memory,
watches of epoll and inotify. And the kernel exempts root from ``RLIMIT_NPROC``. A rollout therefore places
each sandbox in separate cgroups, in version 1 or 2 of the hierarchy, and removes them with the sandbox. If
the rollout is killed, the next rollout on the host removes them.

Version 1 has a hierarchy for each controller, and the cgroups are below the rollout's. In version 2 a cgroup
that contains processes cannot give its children memory, so the sandbox's cgroup is next to the rollout's.

Source: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and cgroup-v1/pids.rst of Linux.
"""

import fcntl
import functools
import itertools
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

_logger = logging.getLogger(__name__)
_PREFIX = "slipstream-sandbox-"
_UNLOCKED_S = 60.0
"""Age in seconds from which a cgroup that no process has locked counts as left over."""
_REMOVE_S = 2.0
"""Deadline in seconds for the removal of a cgroup."""
_TCP_SHARE = 8
"""Part of the memory that TCP and UDP may have in version 1, which counts them separately."""
_TRIAL_BYTES = 64 << 20
_numbers = itertools.count()

Controller = Literal["memory", "pids"]


class Cgroup:
    """Cgroup of one sandbox in one hierarchy, locked while it is in use.

    Args:
        folder: Folder of the new cgroup.
        memory_bytes: Max memory; None if this hierarchy does not limit it.
        max_tasks: Max simultaneous tasks; None if this hierarchy does not limit them.

    Raises:
        OSError: If it cannot be created.
    """

    def __init__(self, folder: Path, *, memory_bytes: int | None, max_tasks: int | None) -> None:
        self._folder = folder
        folder.mkdir()
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            kind = folder / "cgroup.type"
            if memory_bytes is not None:
                self._limit_memory(memory_bytes, is_unified=kind.exists())
            elif kind.exists():
                # Below a cgroup that contains processes, here the rollout's, only threaded cgroups may exist.
                kind.write_text("threaded")
            if max_tasks is not None:
                (folder / "pids.max").write_text(str(max_tasks))
        except BaseException:
            self.remove()
            raise

    @property
    def num_killed(self) -> int:
        """Number of processes that the kernel has killed because the memory was exhausted."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                lines = (self._folder / name).read_text(encoding="ascii").splitlines()
                counts = dict(line.split() for line in lines)
                return int(counts.get("oom_kill", 0))
        return 0

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup; processes that it starts afterwards also belong to the cgroup.

        May take some ms, because the kernel waits until no process is forking.

        Raises:
            OSError: If the process has ended, or the kernel refuses.
        """
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the cgroup, whose processes have ended or are ending."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                self._folder.rmdir()
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(_REMOVE_S / 100)
                    continue
                # The next rollout tries again.
                _logger.warning("removing the cgroup %s failed: %s", self._folder, error)
            os.close(self._lock)
            return

    def _limit_memory(self, num_bytes: int, *, is_unified: bool) -> None:
        if is_unified:
            (self._folder / "memory.max").write_text(str(num_bytes))
            swap, no_swap = self._folder / "memory.swap.max", "0"
        else:
            (self._folder / "memory.limit_in_bytes").write_text(str(num_bytes))
            tcp = self._folder / "memory.kmem.tcp.limit_in_bytes"
            tcp.write_text(str(num_bytes // _TCP_SHARE))
            swap, no_swap = self._folder / "memory.memsw.limit_in_bytes", str(num_bytes)
        if swap.exists():  # kernels without swap have no such file
            swap.write_text(no_swap)


class CgroupSet:
    """Cgroups of one sandbox: one of each hierarchy."""

    def __init__(self, members: Mapping[Path, Cgroup], controllers: frozenset[Controller]) -> None:
        self._members = members
        self.limits_memory = "memory" in controllers

    @property
    def num_killed(self) -> int:
        """Number of processes that the kernel has killed because the memory was exhausted."""
        return max((cgroup.num_killed for cgroup in self._members.values()), default=0)

    def add(self, pid: int) -> None:
        """Moves a process into the cgroups. Raises OSError if it has ended, or the kernel refuses."""
        for cgroup in self._members.values():
            cgroup.add(pid)

    def remove(self) -> None:
        """Removes the cgroups, whose processes have ended or are ending. May block."""
        for cgroup in self._members.values():
            cgroup.remove()


def create_cgroups(*, memory_bytes: int, max_tasks: int) -> CgroupSet:
    """Creates the cgroups of a sandbox, with the controllers of :func:`parent_cgroups`.

    Raises:
        OSError: If one cannot be created, although the first ones could.
    """
    return _created(parent_cgroups(), memory_bytes=memory_bytes, max_tasks=max_tasks)


def children(pid: int) -> list[int]:
    """Returns the processes that the main thread of a process has started. Raises OSError."""
    content = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in content.split()]


@functools.cache
def parent_cgroups() -> Mapping[Controller, Path]:
    """Returns the cgroup below which this process creates those of its sandboxes, by controller.

    The first call tests that cgroups can be created, and removes those of rollouts that were killed. A
    controller that this process may not use is missing, also ``pids`` if RLIMIT_NPROC limits its user.
    """
    parents: dict[Controller, Path] = {}
    try:
        parents["memory"] = _usable("memory")
    except OSError as error:
        _logger.warning(
            "this rollout can create no cgroup with the controller memory (%s), so sandboxes have no sockets "
            "(asyncio needs them), and their memory is checked only four times per second; start the rollout "
            "with a writable cgroup, for example with `systemd-run --user --scope`, or set "
            "rollout.sandbox.loopback",
            error,
        )
    if not _is_root_of_host():
        return parents
    try:
        parents["pids"] = _usable("pids", parents.get("memory"))
    except OSError as error:
        _logger.warning(
            "this rollout runs as root and can create no cgroup (%s), so the number of a sandbox's processes "
            "is checked only four times per second; run it as another user, or give it a writable cgroup",
            error,
        )
    return parents


def _usable(controller: Controller, memory_parent: Path | None = None) -> Path:
    """Returns the parent of cgroups with a controller, after a trial. Raises OSError.

    Args:
        memory_parent: Parent of the cgroups that limit memory: a process has one cgroup in version 2.
    """
    group = own_cgroup(
        Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
        Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        controller,
    )
    is_unified = (group / "cgroup.controllers").exists()
    if is_unified and memory_parent is not None:
        parent = memory_parent
    elif is_unified and controller == "memory":
        # Only the root of the hierarchy, which has no type, may contain processes and distribute memory.
        parent = group.parent if (group / "cgroup.type").exists() else group
        controllers = (parent / "cgroup.subtree_control").read_text(encoding="ascii")
        if controller not in controllers.split():
            raise FileNotFoundError(f"{parent} does not distribute memory to its children")
    else:
        parent = group
    if is_unified and controller == "pids":
        (parent / "cgroup.subtree_control").write_text("+pids")
    remove_left(parent)
    _try_out(parent, controller)
    return parent


def _created(parents: Mapping[Controller, Path], *, memory_bytes: int, max_tasks: int) -> CgroupSet:
    members: dict[Path, Cgroup] = {}
    try:
        for parent in dict.fromkeys(parents.values()):
            members[parent] = Cgroup(
                parent / f"{_PREFIX}{os.getpid()}-{time.time_ns()}-{next(_numbers)}",
                memory_bytes=memory_bytes if parents.get("memory") == parent else None,
                max_tasks=max_tasks if parents.get("pids") == parent else None,
            )
    except BaseException:
        for cgroup in members.values():
            cgroup.remove()
        raise
    return CgroupSet(members, frozenset(parents))


def _try_out(parent: Path, controller: Controller) -> None:
    """Checks that this process can move a process into a new cgroup. Raises OSError."""
    children(os.getpid())
    cgroups = _created({controller: parent}, memory_bytes=_TRIAL_BYTES, max_tasks=1)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # noqa: S607 -- it only waits
            cgroups.add(process.pid)
    finally:
        cgroups.remove()


def _is_root_of_host() -> bool:
    """Returns True if this user is root outside of all user namespaces, as far as this process can see."""
    if os.geteuid() != 0:
        return False
    first = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    return first[:2] == ["0", "0"]


def own_cgroup(mounts: str, memberships: str, controller: Controller) -> Path:
    """Returns the folder of this process's cgroup in the hierarchy with a controller.

    Args:
        mounts: Content of ``/proc/self/mountinfo``.
        memberships: Content of ``/proc/self/cgroup``.

    Raises:
        OSError: If no such hierarchy is mounted.
    """
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    # Version 1 mounts each controller separately; version 2 has the controllers that version 1 has not.
    kind, name = ("cgroup", controller) if controller in paths else ("cgroup2", "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        file_system, _, options = after.split(" ", 2)
        is_it = file_system == kind and (not name or name in options.split(","))
        path = paths.get(name, "")
        if is_it and path and Path(path).is_relative_to(root):
            return Path(mountpoint) / Path(path).relative_to(root)
    raise FileNotFoundError(f"no hierarchy of cgroups with the controller {controller} is mounted")


def remove_left(parent: Path) -> None:
    """Removes the cgroups of rollouts that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another rollout may be removing the cgroup, or may have just created it.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _UNLOCKED_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.rmdir()
            finally:
                os.close(lock)
