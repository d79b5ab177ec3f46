"""Runs untrusted Python programs in a sandboxed process.

Guarantees, regardless of the program (docs/rollouts.md explains them to users):

* It can read Python's and the system's software and nothing else: no home, no project, no ``/proc``, and no
  ``/tmp`` except a private folder that is deleted afterwards. (Landlock, bubblewrap)
* It has no network, starts no process, and neither sees nor affects other processes. (seccomp, bubblewrap)
* It has no privileges, not even root's. (capabilities)
* It is killed at its deadline; memory, file size and open files are limited. (resource limits)
* It ends with the process that started it, however that ends.
* The total size of its files is limited: by the size of a private file system (bubblewrap), else by checks of
  its folder several times a second.
"""

import fcntl
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from services.extras.bubblewrap import bubblewrap, confine, seccomp
from services.extras.code_tests.judging.source import LAST_LINE

logger = logging.getLogger(__name__)

_START_S = 10.0
"""Max seconds until a launcher has started a program; they are no part of the program's wall time."""
_CHECK_S = 0.1
"""Seconds between two checks of the size of a program's files."""
_END_S = 10.0
"""Deadline in seconds for the end of a killed program."""
_REMOVE_S = 60.0
"""Deadline in seconds for the removal of its files."""
_MIN_ENTRY_BYTES = 4096
"""Bytes that count for each file or folder, even an empty one."""
_MAX_OUTPUT_BYTES = 1 << 20
_FOLDER_PREFIX = "slipstream-program-"
_UNLOCKED_S = 60.0
"""Age in seconds from which a folder that no process has locked counts as left over."""
_INNER_FOLDER = "/tmp"  # noqa: S108 -- inside its own namespace
_PROJECT = Path(__file__).parents[2]
_KILLS = (signal.SIGKILL, signal.SIGTERM)
_KILLED = {*(-kill for kill in _KILLS), *(128 + kill for kill in _KILLS)}
"""Exit statuses of killed programs, as a process and as bubblewrap report them."""


class SandboxKilledError(RuntimeError):
    """The program was killed, but not by its limits, so its result is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one program."""

    seconds: float
    """CPU time, and wall time from the program's start."""
    memory_bytes: int
    """Address space."""
    disk_bytes: int = 64 << 20
    """Total size of the files in its folder; with bubblewrap they are in memory."""
    reads_files: bool = False
    """True to let the program read all files that this user can read.

    Needed if the host has neither Landlock nor bubblewrap.
    """


_LIMITED = """\
import os, resource, sys
seconds, memory_bytes = map(int, sys.argv[1:3])
# The soft limit sends a distinct signal; the hard limit sends SIGKILL, which has many other causes.
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 60))
for limit, value in (
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
"""
# The launcher reads each part only before it runs it, so that no frame, constant or source of an
# earlier part contains it.
_LAUNCHER = f"""\
{_LIMITED}
from services.extras.bubblewrap import confine
reads_files, parts = map(int, sys.argv[3:])
confine.confine(os.getcwd(), reads_files=bool(reads_files))
sys.argv = ["program.py"]
names = {{"__name__": "__main__"}}
while size := int.from_bytes(os.read(parts, 8), "big"):
    exec(compile(os.read(parts, size), "program.py", "exec"), names)
"""


# The program is the first process, so that the judge ends with it. Neither has what the other one reads.
_JUDGED_LAUNCHER = f"""\
{_LIMITED}
import json
from services.extras.bubblewrap import confine
from services.extras.code_tests.judging import judge, program
reads_files, parts, tests = map(int, sys.argv[3:])
from_judge, to_program = os.pipe()
from_program, to_judge = os.pipe()
first = os.getpid()
is_judge = os.fork() == 0
verdicts = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for end in (from_judge, to_judge, parts) if is_judge else (from_program, to_program, tests, verdicts):
    os.close(end)
confine.confine(os.getcwd(), reads_files=bool(reads_files))
if is_judge and os.getppid() != first:
    os._exit(1)
content = b"".join(iter(lambda: os.read(tests if is_judge else parts, 1 << 20), b""))
os.close(tests if is_judge else parts)
sys.argv = ["program.py"]
if is_judge:
    judge.judge(json.loads(content), reader=from_program, writer=to_program, verdicts=verdicts)
else:
    program.serve(json.loads(content), reader=from_judge, writer=to_judge)
os._exit(0)
"""


def run_python(sources: Sequence[str], stdin: str, limits: Limits) -> str | None:
    """Runs a Python program.

    Args:
        sources: Parts of the program that run in order and share their names. A part is in the memory of the
            process only once all earlier ones have ended.

    Returns:
        Standard output, up to 1 MiB; None if the program failed or exceeded a limit.

    Raises:
        SandboxKilledError: If the program was killed, but not by its limits.
        RuntimeError: If this host cannot deny the program access to the network or to files.
    """
    contents = [source.encode() for source in sources]
    program = b"".join(len(content).to_bytes(8, "big") + content for content in contents)
    status, output = _run(_LAUNCHER, [program], stdin, limits)
    return output if status == 0 else None


def run_judged(
    sources: Sequence[str], request: Mapping[str, Any], limits: Limits
) -> list[dict[str, Any]]:
    """Runs a Python program, and its tests in a second process that the program cannot see.

    Args:
        sources: Code of the prompt, and the program.
        request: Tests; see :func:`services.extras.code_tests.judging.judge.judge`.

    Returns:
        The verdicts of the tests that ran.

    Raises:
        SandboxKilledError: If the program was killed, but not by its limits.
        RuntimeError: If this host cannot deny the program access to the network or to files.
    """
    contents = [json.dumps(content).encode() for content in ([*sources], dict(request))]
    _, output = _run(_JUDGED_LAUNCHER, contents, "", limits, last_line=LAST_LINE)
    # The last line is incomplete if the judge was killed while it wrote it.
    lines = output.removesuffix(LAST_LINE).split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _run(
    launcher: str, contents: Sequence[bytes], stdin: str, limits: Limits, *, last_line: str = ""
) -> tuple[int | None, str]:
    """Runs a launcher with the descriptors of files with contents.

    Args:
        last_line: Output after which it is killed, unless empty.

    Returns:
        Its exit status, None if it exceeded a limit, and its standard output.
    """
    is_usable = bubblewrap.is_usable()
    _check_host(limits, is_wrapped=is_usable)
    is_wrapped = is_usable and not limits.reads_files
    with (
        nullcontext("/") if is_wrapped else _folder() as folder,
        tempfile.TemporaryFile(buffering=0) as output,
        tempfile.TemporaryFile() as stdin_file,
        ExitStack() as stack,
        _pipe() as (info, info_writer),
    ):
        _write(stdin_file, stdin.encode())
        descriptors = []
        for content in contents:
            file = stack.enter_context(tempfile.TemporaryFile())
            _write(file, content)
            descriptors.append(file.fileno())
        wrapper = bubblewrap.prefix(
            [_INNER_FOLDER],
            disk_bytes=limits.disk_bytes,
            info_fd=info_writer,
            readable=[_PROJECT],
        )
        seconds = max(1, round(limits.seconds))
        process = subprocess.Popen(  # noqa: S603 -- running what the model wrote is the purpose
            [
                *(wrapper if is_wrapped else ()),
                *(sys.executable, "-c", launcher, str(seconds), str(limits.memory_bytes)),
                *(str(int(limits.reads_files)), *map(str, descriptors)),
            ],
            stdin=stdin_file,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            pass_fds=(*descriptors, *((info_writer,) if is_wrapped else ())),
            start_new_session=True,
        )
        try:
            ending = (output.fileno(), last_line.encode()) if last_line else None
            is_in_limits = _wait(
                process,
                None if is_wrapped else folder,
                limits,
                program=descriptors[0],
                ending=ending,
            )
        finally:
            _end(process, info)
        is_ended = ending is not None and _ends_with(*ending)
        if is_in_limits and process.returncode in _KILLED and not is_ended:
            raise SandboxKilledError(
                f"the program was killed (status {process.returncode}), but not by its limits; check the "
                "host's free memory"
            )
        output.seek(0)
        text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
        return process.returncode if is_in_limits else None, text


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    file.seek(0)


def _ends_with(descriptor: int, line: bytes) -> bool:
    """Returns True if a file ends with a line."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, len(line), max(0, size - len(line))) == line


def _wait(
    process: subprocess.Popen[bytes],
    folder: str | None,
    limits: Limits,
    *,
    program: int,
    ending: tuple[int, bytes] | None,
) -> bool:
    """Waits until a program ends; returns False if it takes too long, or writes too much to the folder.

    Args:
        program: File that the launcher begins to read when it starts the program; both processes share its
            offset.
        ending: File and its last line, after which there is nothing to wait for.
    """
    is_started = False
    deadline = time.monotonic() + _START_S + limits.seconds
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            process.wait(min(left_s, _CHECK_S))
        except subprocess.TimeoutExpired:
            if not is_started and os.lseek(program, 0, os.SEEK_CUR) > 0:
                is_started, deadline = True, time.monotonic() + limits.seconds
            if ending is not None and _ends_with(*ending):
                return True
            if folder is not None and _has_more(folder, limits.disk_bytes):
                return False
        else:
            return True
    return False


def _has_more(folder: str, limit_bytes: int) -> bool:
    """Returns True if a folder contains more than the limit or cannot be read completely."""
    num_bytes, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    num_bytes += max(status.st_blocks * 512, _MIN_ENTRY_BYTES)
                    if num_bytes > limit_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # the program removed it in the meantime
            continue
        except OSError:  # the program made it unreadable, or nested it too deeply
            return True
    return False


def _end(process: subprocess.Popen[bytes], info: int) -> None:
    """Kills the rest of a program and waits until none of its processes exists.

    Without bubblewrap, the program has one process, because it cannot start others.
    """
    if process.poll() is None:
        first = bubblewrap.first_process(info)
        if first is None:  # not wrapped, or not started yet
            process.kill()
        else:
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
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
    """Creates a folder, locked while this process lives, and removes it at the end."""
    _remove_left_folders()
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


@functools.cache
def _remove_left_folders() -> None:
    """Removes the folders of processes that were killed, once per process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < _UNLOCKED_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
        except OSError:  # another user's, or removed in the meantime
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(str(folder))
        except BlockingIOError:  # its process lives
            continue
        finally:
            os.close(lock)


def _remove(folder: str) -> None:
    """Removes a folder, even with unreadable or very deeply nested folders."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        remove = ["rm", "-rf", folder]
        # This starts a process per folder, which is slow, so it runs only if `rm` alone has failed.
        chmod = ["find", folder, "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"]
        for command in (remove, chmod, remove):
            if Path(folder).exists():
                subprocess.run(  # noqa: S603 -- the folder is ours
                    command, stderr=subprocess.DEVNULL, timeout=_REMOVE_S, check=False
                )
    if Path(folder).exists():
        logger.error("deleting the folder of a sandboxed program failed", extra={"folder": folder})


def _check_host(limits: Limits, *, is_wrapped: bool) -> None:
    if not seccomp.is_supported():
        raise RuntimeError(
            "code_tests needs Linux on x86_64 or aarch64 to block network access of programs"
        )
    if not (limits.reads_files or is_wrapped or confine.has_landlock()):
        raise RuntimeError(
            "code_tests needs bubblewrap, or a kernel with Landlock (Linux 5.13, enabled by lsm=), to block "
            "file access of programs; set the reward's argument reads_files to true if this user cannot read "
            "secrets"
        )
