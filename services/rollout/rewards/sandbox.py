"""Untrusted programs in a process of their own.

What holds for such a program, whatever it does (docs/rollouts.md says it for users):

* It reads Python's and the system's software and nothing else: no home, no project, no ``/proc``, no
  ``/tmp`` but a folder of its own, which is deleted afterwards. (Landlock, bubblewrap)
* It has no network and starts no process; it neither sees others nor acts on them. (seccomp, bubblewrap)
* It has no privileges, not even root's. (capabilities)
* It is killed at its time; memory, file size and open files are limited. (resource limits)
* What it writes in all is limited: by the size of a file system of its own (bubblewrap), else by looking at
  its folder several times a second.
"""

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from services.rollout.rewards import bubblewrap, landlock, seccomp

logger = logging.getLogger(__name__)

_CHECK_S = 0.1
"""Time between two looks at what a program has written."""
_END_S = 10.0
"""Deadline of the end of a killed program."""
_REMOVE_S = 60.0
"""Deadline of the removal of what it wrote."""
_MIN_ENTRY_BYTES = 4096
"""What a file or folder counts, even an empty one."""
_MAX_OUTPUT_BYTES = 1 << 20
_KILLS = (signal.SIGKILL, signal.SIGTERM)
_KILLED = {*(-kill for kill in _KILLS), *(128 + kill for kill in _KILLS)}
"""As a process says it, and as bubblewrap does."""


class SandboxKilledError(RuntimeError):
    """The program was killed from outside its limits, so nothing is known about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float
    """CPU and wall time."""
    memory_bytes: int
    """Address space."""
    disk_bytes: int = 64 << 20
    """All files in its folder; with bubblewrap they lie in memory."""
    reads_files: bool = False
    """Whether it may read what this user can read. Needed where the host has neither Landlock nor
    bubblewrap."""


# A part is read when its turn comes: no frame, constant or source of an earlier one holds it.
_LAUNCHER = """\
import os, resource, sys
from services.rollout.rewards import confine
seconds, memory_bytes, reads_files, parts = map(int, sys.argv[1:])
# At the soft limit comes a signal that tells of the limit; at the hard one SIGKILL, which could be anybody's.
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 60))
for limit, value in (
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
confine.confine(os.getcwd(), reads_files=bool(reads_files))
sys.argv = ["program.py"]
names = {"__name__": "__main__"}
while size := int.from_bytes(os.read(parts, 8), "big"):
    exec(compile(os.read(parts, size), "program.py", "exec"), names)
"""


def run_python(parts: Sequence[str], given: str, limits: Limits) -> str | None:
    """Run a Python program.

    Args:
        parts: Of the program: they run one after the other and share their names. None is in the memory of
            the process before those in front of it have ended.
        given: Its standard input.
        limits: What it may use.

    Returns:
        Its standard output, or None if it failed, took too long or printed too much.

    Raises:
        SandboxKilledError: If something else killed it.
        RuntimeError: If this host cannot deny it the network, or files.
    """
    is_usable = bubblewrap.is_usable()
    _check_host(limits, is_wrapped=is_usable)
    with (
        _folder() as folder,
        tempfile.TemporaryFile(buffering=0) as output,
        tempfile.TemporaryFile() as given_file,
        tempfile.TemporaryFile() as given_parts,
        _pipe() as (info, info_writer),
    ):
        _write(given_file, given.encode())
        contents = [part.encode() for part in parts]
        _write(given_parts, b"".join(len(each).to_bytes(8, "big") + each for each in contents))
        wrapper = bubblewrap.prefix(folder, disk_bytes=limits.disk_bytes, info_fd=info_writer)
        is_wrapped = is_usable and not limits.reads_files
        seconds = max(1, round(limits.seconds))
        process = subprocess.Popen(  # noqa: S603 -- running what the model wrote is the purpose
            [
                *(wrapper if is_wrapped else ()),
                *(sys.executable, "-c", _LAUNCHER, str(seconds), str(limits.memory_bytes)),
                *(str(int(limits.reads_files)), str(given_parts.fileno())),
            ],
            stdin=given_file,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            pass_fds=(given_parts.fileno(), *((info_writer,) if is_wrapped else ())),
            start_new_session=True,
        )
        try:
            is_in_limits = _wait(process, folder, limits)
        finally:
            _end(process, info)
        if not is_in_limits:
            return None
        if process.returncode in _KILLED:
            raise SandboxKilledError(
                f"the program was killed (status {process.returncode}), not by its limits; is the host out "
                "of memory?"
            )
        output.seek(0)
        text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
        return text if process.returncode == 0 else None


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    file.seek(0)


def _wait(process: subprocess.Popen[bytes], folder: str, limits: Limits) -> bool:
    """Wait for the end of a program; False if it takes too long or writes too much."""
    deadline = time.monotonic() + limits.seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            process.wait(min(left, _CHECK_S))
        except subprocess.TimeoutExpired:
            if _has_more(folder, limits.disk_bytes):
                return False
        else:
            return True
    return False


def _has_more(folder: str, limit_bytes: int) -> bool:
    """Return whether a folder holds more, or hides from us what it holds."""
    num_bytes, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    num_bytes += max(found.st_blocks * 512, _MIN_ENTRY_BYTES)
                    if num_bytes > limit_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # the program has removed it meanwhile
            continue
        except OSError:  # it made it unreadable, or nested it too deeply
            return True
    return False


def _end(process: subprocess.Popen[bytes], info: int) -> None:
    """Kill what is left of a program and wait until no process of it exists.

    With bubblewrap, its first process inside is killed: the kernel ends a process namespace with its first
    process, and bubblewrap ends after it. A program of its own has one process, for it cannot start others.
    """
    if process.poll() is None:
        told = os.read(info, 1 << 12) if select.select([info], [], [], 0)[0] else b""
        try:
            first, _ = json.JSONDecoder().raw_decode(
                told.decode()
            )  # what follows is not bubblewrap's
            os.kill(first["child-pid"], signal.SIGKILL)
        except (ValueError, KeyError, ProcessLookupError):  # not wrapped, or not begun yet
            process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def _folder() -> Iterator[str]:
    """A folder that is removed, whatever a program left there: unreadable folders, or thousands nested."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            for command in (
                ["find", folder, "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"],
                ["rm", "-rf", folder],
            ):
                subprocess.run(  # noqa: S603 -- the folder is ours
                    command, stderr=subprocess.DEVNULL, timeout=_REMOVE_S, check=False
                )
        if Path(folder).exists():
            logger.error("the folder of a sandboxed program stays", extra={"folder": folder})


def _check_host(limits: Limits, *, is_wrapped: bool) -> None:
    if not seccomp.is_supported():
        raise RuntimeError(
            "code_tests needs Linux on x86_64 or aarch64, to keep programs off the network"
        )
    if not (limits.reads_files or is_wrapped or landlock.is_supported()):
        raise RuntimeError(
            "code_tests needs bubblewrap, or a kernel with Landlock (Linux 5.13, enabled by lsm=), to keep "
            "programs off files; set the reward's argument reads_files to true if this user can read nothing "
            "secret"
        )
