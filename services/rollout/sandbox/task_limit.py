"""Limits the tasks (processes and their threads) of a sandbox by a cgroup with the ``pids`` controller.

The kernel exempts root from ``RLIMIT_NPROC``. A rollout that runs as root therefore places each sandbox in a
separate cgroup below the rollout's cgroup, in version 1 or 2 of the hierarchy. The rollout removes the cgroup
with the sandbox. If the rollout is killed, the next rollout on the host removes the cgroup.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/pids.rst of Linux.
"""

import fcntl
import functools
import itertools
import logging
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_logger = logging.getLogger(__name__)
_PREFIX = "slipstream-sandbox-"
_UNLOCKED_S = 60.0
"""Age in seconds from which a cgroup that no process has locked counts as left over."""
_numbers = itertools.count()


class TaskLimit:
    """Cgroup of one sandbox, locked while it is in use.

    Args:
        folder: Folder of the new cgroup.
        max_tasks: Max simultaneous tasks in it.

    Raises:
        OSError: If it cannot be created.
    """

    def __init__(self, folder: Path, max_tasks: int) -> None:
        self._folder = folder
        folder.mkdir()
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (kind := folder / "cgroup.type").exists():  # version 2
                # Below a cgroup that contains processes, here the rollout's, only threaded cgroups may exist.
                kind.write_text("threaded")
            (folder / "pids.max").write_text(str(max_tasks))
        except BaseException:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup; processes that it starts afterwards also belong to the cgroup.

        May take some ms, because the kernel waits until no process is forking.

        Raises:
            OSError: If the process has ended, or the kernel refuses.
        """
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the cgroup, whose processes have ended."""
        try:
            self._folder.rmdir()
        except OSError as error:  # the next rollout tries again
            _logger.warning("removing the cgroup %s failed: %s", self._folder, error)
        os.close(self._lock)


def limit_tasks(max_tasks: int) -> TaskLimit | None:
    """Creates the cgroup of a sandbox; returns None if the rollout needs none, or cannot create any."""
    parent = parent_cgroup()
    if parent is None:
        return None
    try:
        return TaskLimit(_next_folder(parent), max_tasks)
    except OSError as error:
        _logger.warning(
            "a sandbox starts without a limit of the kernel on its processes: %s", error
        )
        return None


def children(pid: int) -> list[int]:
    """Returns the processes that the main thread of a process has started. Raises OSError."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in found.split()]


def _next_folder(parent: Path) -> Path:
    return parent / f"{_PREFIX}{os.getpid()}-{time.time_ns()}-{next(_numbers)}"


@functools.cache
def parent_cgroup() -> Path | None:
    """Returns the cgroup below which this process creates the cgroups of its sandboxes, or None.

    The first call tests that cgroups can be created, and removes those of rollouts that were killed. None if
    this process is not the host's root, or can create no cgroup.
    """
    if not _is_root_of_host():
        return None
    try:
        parent = _own_cgroup(
            Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
            Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        )
        if (controllers := parent / "cgroup.subtree_control").exists():
            controllers.write_text("+pids")
        remove_left(parent)
        _try_out(parent)
    except OSError as error:
        _logger.warning(
            "this rollout runs as root and can create no cgroup (%s), so the number of a sandbox's processes "
            "is checked only four times per second; run it as another user, or give it a writable cgroup",
            error,
        )
        return None
    return parent


def _try_out(parent: Path) -> None:
    """Checks that this process can move a process into a new cgroup. Raises OSError."""
    children(os.getpid())
    limit = TaskLimit(_next_folder(parent), 1)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # noqa: S607 -- it only waits
            limit.add(process.pid)
    finally:
        limit.remove()


def _is_root_of_host() -> bool:
    """Returns True if this user is root outside of all user namespaces, as far as this process can see."""
    if os.geteuid() != 0:
        return False
    first = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    return first[:2] == ["0", "0"]


def _own_cgroup(mounts: str, memberships: str) -> Path:
    """Returns the folder of this process's cgroup in the hierarchy with the ``pids`` controller.

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
    kind, name = ("cgroup", "pids") if "pids" in paths else ("cgroup2", "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        file_system, _, options = after.split(" ", 2)
        is_it = file_system == kind and (not name or name in options.split(","))
        path = paths.get(name, "")
        if is_it and path and Path(path).is_relative_to(root):
            return Path(mountpoint) / Path(path).relative_to(root)
    raise FileNotFoundError("no hierarchy of cgroups with the pids controller is mounted")


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
