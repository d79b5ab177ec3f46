"""Runs programs in their own namespaces with bubblewrap, if the host has a working one.

In bubblewrap no other process is visible, no network device exists, and no file except those listed here.
Kernels and container runtimes may forbid user namespaces. ``code_tests`` then uses its other restrictions
alone (:mod:`services.extras.code_tests.programs`); sandboxes of episodes do not start.
"""

import asyncio
import functools
import io
import json
import logging
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.callables import real_path
from services.extras.bubblewrap import cgroup, seccomp
from services.extras.bubblewrap.cgroup import CgroupSet
from services.extras.bubblewrap.confine import software
from services.rollout.sandbox.base import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    CommandResult,
    Limit,
    SandboxError,
    restore,
    starts_on_this_host,
)

if TYPE_CHECKING:  # each process of a built-in reward would import pydantic for it
    from services.common.runspec.rollout import SandboxSpec

_logger = logging.getLogger(__name__)
_PROGRAM = "bwrap"
_ALONE = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
_TRIAL_FOLDER = ("--size", "4096", "--tmpfs", "/tmp")  # noqa: S108 -- inside its own namespace
_TRIAL_TIMEOUT_S = 10.0
# The host's root may write to /proc/sys even inside namespaces and without any capability.
_PROC = ("--proc", "/proc", "--remount-ro", "/proc")
_INIT = Path(__file__).with_name("init.py")
_TEMPORARY = ("/tmp", "/dev/shm")  # noqa: S108 -- inside its own namespace
_LIMITS: Mapping[str, Limit] = {
    "-": "",
    "time": "time",
    "memory": "memory",
    "processes": "processes",
    "files": "files",
}
_MORE_BYTES = 32 << 20
"""Memory of a sandbox's cgroup beyond that of its commands and files, for ``init.py`` and its output."""
_MORE_TASKS = 256
"""Tasks that the kernel admits beyond ``max_processes``, until ``init.py`` kills the command and reports it.

Threads count as tasks, and so do the two processes that serve the sandbox."""
_KILLED_STATUS = 128 + signal.SIGKILL
# The answer to a command may come later than its time limit, on a busy host.
_GRACE_S = 30.0


@functools.cache
def is_usable() -> bool:
    """Returns True if bubblewrap is installed and works here; tests it once."""
    if shutil.which(_PROGRAM) is None:
        _logger.info("bubblewrap is not installed; seccomp and Landlock confine programs")
        return False
    problem = _try_out()
    if problem:
        _logger.warning(
            "bubblewrap does not work here; only seccomp and Landlock confine programs: %s", problem
        )
    return not problem


def _try_out(*options: str) -> str:
    """Runs ``true`` in bubblewrap; returns the error message, or an empty string if it works."""
    trial = subprocess.run(  # noqa: S603 -- a program of the host
        [
            _path(),
            *_ALONE,
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            *_TRIAL_FOLDER,
            *options,
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=_TRIAL_TIMEOUT_S,
        check=False,
    )
    return trial.stderr.strip() if trial.returncode else ""


def prefix(
    folders: Sequence[str],
    *,
    disk_bytes: int,
    info_fd: int,
    readable: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """Returns arguments to put before a command, so that it sees software, some folders and nothing else.

    The parent folders of bubblewrap's mounts are also in memory, and become read-only.

    Args:
        folders: Folders that the command may write to, the working folder first. Each is a file system in
            memory, which ends with the namespaces.
        info_fd: File descriptor to which bubblewrap writes ``{"child-pid": ...}``, the first process of the
            namespaces; see :func:`first_process`.
        readable: Files and folders that the command may read, in addition to software.
        options: Further arguments of bubblewrap.
    """
    binds = [
        argument
        for path in (*software(), *readable)
        for argument in ("--ro-bind-try", str(path), str(path))
    ]
    writable = [
        argument
        for folder in folders
        for argument in ("--size", str(disk_bytes), "--tmpfs", folder)
    ]
    # Software may lie below a writable folder, so it is mounted after them.
    return [
        *(_path(), *_ALONE, "--info-fd", str(info_fd), "--dev", "/dev", *writable, *binds),
        *(*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folders[0], "--"),
    ]


def first_process(info: int, timeout_s: float = 0.0) -> int | None:
    """Returns the id of the first process in the namespaces; None if bubblewrap has not started it.

    When the first process of a PID namespace ends, the kernel kills all others, and bubblewrap ends after
    them. A caller that kills this process and waits for bubblewrap thus knows that no process of the sandbox
    is left.

    Args:
        info: Reading end of the pipe whose other end is ``info_fd``; can be read once.
        timeout_s: Max seconds between two parts of bubblewrap's output.
    """
    output = b""
    while select.select([info], [], [], timeout_s)[0] and (chunk := os.read(info, 1 << 12)):
        output += chunk
        with suppress(ValueError, KeyError):  # bubblewrap writes it in several parts
            first, _ = json.JSONDecoder().raw_decode(output.decode())
            return int(first["child-pid"])
    return None


class Bubblewrap:
    """Starts sandboxes on this host without a daemon. They end with this process, however it ends.

    A sandbox sees Python's and the system's software. Its image is a folder, which is copied to its working
    folder at the start.
    """

    def __init__(self, spec: "SandboxSpec") -> None:
        self._spec = spec
        self._max_tasks = spec.max_processes + _MORE_TASKS
        self._writable = (*spec.folders, *_TEMPORARY)
        limits = (spec.memory_bytes, spec.max_processes, self._max_tasks, spec.disk_bytes)
        self._arguments = [*map(str, limits), *self._writable]
        # Files are in memory, too.
        disk_bytes = len(self._writable) * spec.disk_bytes
        self._max_bytes = spec.memory_bytes + disk_bytes + spec.output_bytes + _MORE_BYTES

    @property
    def max_starts(self) -> int:
        """Max simultaneous starts."""
        return starts_on_this_host()

    async def prepare(self) -> None:
        """Checks that bubblewrap works here. Raises SandboxError."""
        if not await asyncio.to_thread(is_usable):
            raise SandboxError(
                "rollout.sandbox.kind 'bubblewrap' needs bwrap (Debian package bubblewrap) on the rollout's "
                "host, and permission to create user namespaces; install it, or use another kind"
            )
        if problem := await asyncio.to_thread(_try_out, *_PROC):
            raise SandboxError(
                "rollout.sandbox.kind 'bubblewrap' needs a /proc of its own to limit processes and memory, "
                f"and the rollout's host forbids it ({problem}); use another kind, or unmask the /proc of "
                "the rollout's container"
            )
        if self._spec.image and self._spec.image_column is None:
            await asyncio.to_thread(_archive, self._spec.image, self._spec.disk_bytes)

    async def start(self, image: str) -> "BubblewrapSandbox":
        """Starts a sandbox. Raises SandboxError."""
        try:
            cgroups = cgroup.create_cgroups(memory_bytes=self._max_bytes, max_tasks=self._max_tasks)
        except OSError as error:
            raise SandboxError(f"the sandbox's cgroup cannot be created: {error}") from error
        reader, writer = os.pipe()
        system_calls = _system_calls(
            has_cgroup=cgroups.limits_memory,
            has_sockets=cgroups.limits_memory or self._spec.loopback,
            has_network=self._spec.loopback,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *prefix(
                    self._writable,
                    disk_bytes=self._spec.disk_bytes,
                    info_fd=writer,
                    # Commands can neither stop nor kill the first process of their namespace.
                    options=(*_PROC, "--as-pid-1", "--seccomp", str(system_calls)),
                ),
                *(sys.executable, "-I", "-S", "-c", _init_program(), *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd="/",
                env=_environment(self._spec.folders[0]),
                pass_fds=(writer, system_calls),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            cgroups.remove()
            raise
        finally:
            os.close(writer)
            os.close(system_calls)
        sandbox = BubblewrapSandbox(process, reader, cgroups)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                # The sandbox's first program starts at the same time.
                await sandbox.enter_cgroups()
                await sandbox.wait_ready()
            if image:
                folder = self._folder(image)
                archive = await asyncio.to_thread(_archive, folder, self._spec.disk_bytes)
                await restore(sandbox, archive)
        except TimeoutError as error:
            await sandbox.end()
            raise SandboxError(f"bubblewrap did not start within {START_TIMEOUT_S:g} s") from error
        except BaseException:
            await sandbox.end()
            raise
        return sandbox

    async def close(self) -> None:
        """Does nothing: every sandbox has ended by itself."""

    def _folder(self, image: str) -> str:
        """Returns the folder of an image. Raises SandboxError if a row names one outside the run's folder."""
        if self._spec.image_column is None:
            return image
        root = Path(real_path(self._spec.image))
        folder = Path(real_path(root / image)) if "\0" not in image else Path()
        if not folder.is_relative_to(root):
            raise SandboxError(
                f"the row's {self._spec.image_column!r} {image!r} is outside rollout.sandbox.image "
                f"({self._spec.image!r}); name a folder inside"
            )
        return str(folder)


class BubblewrapSandbox:
    """One sandbox; its first program (``init.py``) runs commands one after the other.

    Args:
        info: Reading end of the pipe of :func:`first_process`.
        cgroups: Cgroups for its processes.
    """

    def __init__(self, process: Process, info: int, cgroups: CgroupSet) -> None:
        self._process = process
        self._info = info
        self._cgroups = cgroups
        self._num_killed = 0
        self._first: int | None = None
        self._turn = asyncio.Lock()
        self._has_ended = False

    async def enter_cgroups(self) -> None:
        """Moves the sandbox's processes into its cgroups, before the first command. Raises SandboxError."""
        # The thread has its own descriptor, because `end` may close this one meanwhile.
        info = os.dup(self._info)
        self._first = await asyncio.to_thread(_enter, info, self._cgroups)

    async def wait_ready(self) -> None:
        """Waits until commands can run. Raises SandboxError."""
        await self._answer()

    async def execute(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> CommandResult:
        """Runs a shell command in the working folder. Raises SandboxError if the sandbox has ended."""
        assert self._process.stdin is not None
        text = command.encode(errors="surrogateescape")
        head = f"{len(text)} {len(stdin)} {round(timeout_s * 1000)} {output_bytes}\n".encode()
        async with self._turn:
            if self._has_ended:
                raise SandboxError("the sandbox has ended")
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    self._process.stdin.write(head + text + stdin)
                    await self._process.stdin.drain()
                    return self._with_kernels_limit(await self._answer())
            except BaseException as error:
                # The answer may still arrive, and would be taken for that of the next command.
                await self.end()
                if isinstance(error, TimeoutError | ConnectionError):
                    message = f"the sandbox stopped responding: {error!r}"
                    raise SandboxError(message) from error
                raise

    async def end(self) -> None:
        """Kills all processes of the sandbox and waits until none exists; its files are gone with them."""
        if self._has_ended:
            return
        self._has_ended = True
        first = self._first or first_process(self._info)
        os.close(self._info)
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                if first is not None:
                    os.kill(first, signal.SIGKILL)
                else:
                    self._process.kill()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        finally:
            await asyncio.to_thread(self._cgroups.remove)

    def _with_kernels_limit(self, result: CommandResult) -> CommandResult:
        """Returns a result with the limit ``memory`` if the kernel has killed a process at it meanwhile."""
        before, self._num_killed = self._num_killed, self._cgroups.num_killed
        # A command whose child was killed may go on to its time limit.
        if self._num_killed == before or result.limit not in ("", "time"):
            return result
        return replace(result, exit_status=_KILLED_STATUS, limit="memory")

    async def _answer(self) -> CommandResult:
        """Reads one answer of the first program."""
        assert self._process.stdout is not None
        try:
            head = await self._process.stdout.readuntil()
            status, is_truncated, limit, num_bytes = head.decode().split()
            return CommandResult(
                exit_status=int(status),
                output=await self._process.stdout.readexactly(int(num_bytes)),
                is_truncated=is_truncated == "1",
                limit=_LIMITS[limit],
            )
        except asyncio.IncompleteReadError as error:
            exit_status = await self._process.wait()
            if self._cgroups.num_killed > self._num_killed:
                # The kernel may choose ``init.py`` if the memory of the command is in the kernel. The
                # sandbox has then ended with the command.
                return CommandResult(
                    exit_status=_KILLED_STATUS, output=b"", is_truncated=False, limit="memory"
                )
            assert self._process.stderr is not None
            message = (await self._process.stderr.read(1 << 12)).decode(errors="replace").strip()
            raise SandboxError(
                f"the sandbox died (status {exit_status}): {message or 'no message'}; if the host is short "
                "of memory, lower rollout.sandbox.max_running or memory_bytes"
            ) from error


def _enter(info: int, cgroups: CgroupSet) -> int | None:
    """Moves a sandbox's first process and its children into its cgroups; returns its id, None if it ended."""
    try:
        first = first_process(info, START_TIMEOUT_S)
        if first is not None:
            cgroups.add(first)
            # Children that it starts from now on are in the cgroups from their start.
            for child in cgroup.children(first):
                cgroups.add(child)
    except (ProcessLookupError, FileNotFoundError):  # `wait_ready` reports the reason
        return None
    except OSError as error:
        raise SandboxError(f"the sandbox cannot enter its cgroup: {error}") from error
    else:
        return first
    finally:
        os.close(info)


@functools.lru_cache(64)
def _archive(image: str, max_bytes: int) -> bytes:
    """Returns a folder of this host as a tar archive. Raises SandboxError."""
    content = io.BytesIO()
    num_bytes = 0

    def add(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal num_bytes
        num_bytes += entry.size
        if num_bytes > max_bytes:
            raise SandboxError(
                f"the sandbox's image {image!r} has more than rollout.sandbox.disk_bytes ({max_bytes}); "
                "raise it"
            )
        return entry

    if not Path(image).is_dir():
        raise SandboxError(f"the sandbox's image {image!r} must be a folder on the rollout's host")
    try:
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.add(image, arcname=".", filter=add)
    except OSError as error:
        raise SandboxError(f"the sandbox's image {image!r} cannot be read: {error}") from error
    return content.getvalue()


def _system_calls(**options: bool) -> int:
    """Returns the reading end of a pipe that contains the system call filter with these options."""
    reader, writer = os.pipe()
    os.write(writer, seccomp.sandbox_filter(platform.machine(), **options))
    os.close(writer)
    return reader


@functools.cache
def _init_program() -> str:
    return _INIT.read_text(encoding="utf-8")


@functools.cache
def _path() -> str:
    return shutil.which(_PROGRAM) or _PROGRAM


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
    }
