"""First program in a bubblewrap sandbox of an episode: runs commands that arrive on standard input.

A request is a line of four numbers (bytes of the command, bytes of its standard input, milliseconds, max
bytes of output), the command and its input. An answer is a line of the exit status, 1 if output was dropped,
the exceeded limit or ``-``, and the bytes of the output, and the output. The program exits at the end of its
standard input, and the sandbox with it.

It is the first process of its PID namespace, so that commands cannot stop it, and reaps orphans. Commands
have its user, but the kernel lets them neither trace it nor open its memory and its pipes.

It runs from its source text and imports little, because its start takes most of the start of a sandbox.
"""

import ctypes
import os
import resource
import select
import sys
import time

_CHECK_S = 0.25
"""Seconds between two checks of the limits that all processes share."""
_END_TIMEOUT_S = 5.0
"""Deadline in seconds for the end of killed processes."""
_READ_BYTES = 1 << 16
_MAX_OPEN_FILES = 1024
# Numbers, because the import of the module `signal` takes longer than all other imports.
_SIGINT, _SIGKILL, _SIGPIPE, _SIGXFSZ = 2, 9, 13, 25
_NOT_STARTED_STATUS = 126
_PR_SET_DUMPABLE = 4
_PAGE_BYTES = resource.getpagesize()
_OPEN_FILE_BYTES = 2 * _PAGE_BYTES
"""Memory that counts for each open file: that of a pipe, once the user's pipes are many."""
_MIN_FILE_BYTES = 4096
"""Bytes of the disk that count for each file or folder, even an empty one."""
_MIN_FILES = 1024
"""Files and folders that each writable folder may have, however small the disk is."""
_MAX_LOCKS_BYTES = 1 << 16
"""Size of the list of locks on parts of files, about a thousand, which no limit of the kernel counts."""


class _Limits:
    """Limits of all commands together.

    Args:
        folders: Folders that commands may write to, each with ``disk_bytes``.
    """

    def __init__(
        self, memory_bytes: int, processes: int, disk_bytes: int, folders: list[str]
    ) -> None:
        self._memory_bytes = memory_bytes
        self._processes = processes
        self._files = max(_MIN_FILES, disk_bytes // _MIN_FILE_BYTES)
        self._folders = folders

    def exceeded(self, command: int | None = None) -> str:
        """Returns the name of a limit that all processes together exceed, or an empty string.

        Args:
            command: Process whose status the caller needs.
        """
        _reap(command)
        processes = _others()
        if len(processes) > self._processes:
            return "processes"
        if sum(map(_memory_of, processes)) > self._memory_bytes or _locks_are_many():
            return "memory"
        # An empty file takes memory, but nothing of the size of its file system.
        if any(map(self._has_more_files, self._folders)):
            return "files"
        return ""

    def _has_more_files(self, folder: str) -> bool:
        system = os.statvfs(folder)
        return system.f_files - system.f_ffree > self._files


def serve(limits: _Limits) -> None:
    """Runs commands until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _answer(0, is_truncated=False, limit="", output=b"")
    while True:
        _wait_for_request(limits)
        if not (line := requests.readline()):
            break
        command_bytes, stdin_bytes, milliseconds, output_bytes = map(int, line.split())
        command, stdin = requests.read(command_bytes), requests.read(stdin_bytes)
        output = _Output(output_bytes)
        # Processes that the last command left may still start others, and leave none for this command.
        _kill_if_exceeded(limits)
        try:
            try:
                process = _start(command, stdin, output)
            except BlockingIOError:
                _kill_if_exceeded(limits)
                process = _start(command, stdin, output)
        except (OSError, ValueError) as error:  # a zero byte, too long, or the process limit
            output.close_writer()
            output.read_rest()
            output.content += f"the command cannot start: {error}\n".encode()
            _answer(_NOT_STARTED_STATUS, is_truncated=False, limit="", output=output.content)
            continue
        deadline = time.monotonic() + milliseconds / 1000
        limit = _wait(process, output, deadline, limits)
        if limit:
            _kill_others()
        _, status = os.waitpid(process, 0)
        if limit:
            _wait_for_others()
        output.read_rest()
        status = 128 + _SIGKILL if limit else os.waitstatus_to_exitcode(status)
        _answer(
            status if status >= 0 else 128 - status,
            is_truncated=output.is_truncated,
            limit=limit,
            output=output.content,
        )
    answers.close()


class _Output:
    """Pipe for the output of a command, and its first bytes; the rest is read and dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.reader, self.writer = os.pipe()
        self.content = bytearray()
        self.is_truncated = False
        self._max_bytes = max_bytes

    def close_writer(self) -> None:
        os.close(self.writer)

    def read(self) -> bool:
        """Reads once; returns False at the end of the output."""
        chunk = os.read(self.reader, _READ_BYTES)
        room = self._max_bytes - len(self.content)
        self.is_truncated |= len(chunk) > room
        self.content += chunk[:room]
        return bool(chunk)

    def read_rest(self) -> None:
        """Reads the available output without waiting: a background process may keep the pipe open."""
        os.set_blocking(self.reader, False)
        try:
            while self.read():
                pass
        except BlockingIOError:
            pass
        os.close(self.reader)


def _start(command: bytes, content: bytes, output: _Output) -> int:
    stdin = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)  # noqa: S108 -- inside its own namespace
    try:
        for begin in range(0, len(content), _READ_BYTES):
            os.write(stdin, content[begin : begin + _READ_BYTES])
        os.lseek(stdin, 0, os.SEEK_SET)
        process = os.posix_spawn(
            "/bin/sh",
            (b"/bin/sh", b"-c", command),
            os.environ,  # noqa: TID251 -- bubblewrap has set it
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_DUP2, output.writer, 1),
                (os.POSIX_SPAWN_DUP2, output.writer, 2),
            ],
            setsid=True,
            setsigdef=[_SIGPIPE, _SIGXFSZ],  # Python ignores them, and its children would, too
        )
    finally:
        os.close(stdin)
    output.close_writer()
    return process


def _wait(process: int, output: _Output, deadline: float, limits: _Limits) -> str:
    """Reads output until a command ends; returns the name of a limit that it exceeded, or an empty string."""
    descriptor = os.pidfd_open(process)
    watched = [sys.stdin.fileno(), descriptor, output.reader]
    check_at = time.monotonic() + _CHECK_S
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select(watched, [], [], min(left_s, _CHECK_S))
            if sys.stdin.fileno() in readable:
                sys.exit()  # the next request comes after this answer, so this is the end of the input
            if output.reader in readable and not output.read():
                watched.remove(output.reader)
            if descriptor in readable:
                return ""
            if time.monotonic() >= check_at:
                if limit := limits.exceeded(process):
                    return limit
                check_at = time.monotonic() + _CHECK_S
    finally:
        os.close(descriptor)
    return "time"


def _wait_for_request(limits: _Limits) -> None:
    """Waits for the next request; meanwhile enforces the limits of background processes."""
    while not select.select([sys.stdin.fileno()], [], [], _CHECK_S if _others() else None)[0]:
        _kill_if_exceeded(limits)


def _kill_if_exceeded(limits: _Limits) -> None:
    """Kills the background processes of all commands if together they exceed a limit."""
    if limits.exceeded():
        _kill_others()
        _wait_for_others()


def _kill_others() -> None:
    """Kills all processes except this one, background ones included."""
    try:
        os.kill(-1, _SIGKILL)
    except ProcessLookupError:  # there is none
        return


def _others() -> list[str]:
    """Returns the ids of all processes except this one."""
    names = os.listdir("/proc")  # noqa: PTH208 -- pathlib is slow to import
    return [name for name in names if name.isdecimal() and int(name) != os.getpid()]


def _reap(command: int | None = None) -> None:
    """Removes the orphans that have ended; a command keeps its status for its caller."""
    for name in _others():
        if int(name) != command:
            try:
                os.waitpid(int(name), os.WNOHANG)
            except ChildProcessError:  # its parent lives, or it ended meanwhile
                continue


def _wait_for_others() -> None:
    """Waits until killed processes are gone, so that they do not affect the next command."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _others() and time.monotonic() < deadline:
        _reap()
        time.sleep(_CHECK_S / 10)


def _memory_of(process: str) -> int:
    """Returns the memory of a process in bytes, with its page tables and what its open files hold."""
    try:
        with open(f"/proc/{process}/statm", "rb") as file:  # noqa: PTH123
            num_bytes = int(file.read().split()[1]) * _PAGE_BYTES
        with open(f"/proc/{process}/status", "rb") as file:  # noqa: PTH123
            for line in file:
                if line.startswith((b"VmPTE:", b"VmSwap:")):
                    num_bytes += int(line.split()[1]) << 10
        # Kernels before 6.2 report 0.
        return num_bytes + os.stat(f"/proc/{process}/fd").st_size * _OPEN_FILE_BYTES  # noqa: PTH116
    except OSError:  # it has ended in the meantime
        return 0


def _locks_are_many() -> bool:
    try:
        with open("/proc/locks", "rb") as file:  # noqa: PTH123
            return len(file.read(_MAX_LOCKS_BYTES)) == _MAX_LOCKS_BYTES
    except OSError:  # the kernel was built without such locks
        return False


def _answer(status: int, *, is_truncated: bool, limit: str, output: bytes | bytearray) -> None:
    answers = sys.stdout.buffer
    answers.write(f"{status} {int(is_truncated)} {limit or '-'} {len(output)}\n".encode())
    answers.write(output)
    answers.flush()


def main() -> None:
    """Sets the resource limits of child processes and serves; RLIMIT_NPROC is per user and exempts root.

    Raises:
        OSError: If the kernel cannot protect this process from commands.
    """
    # Commands would write answers, or stop this process, through ptrace, /proc/1/fd and pidfd_getfd. A
    # program that a command executes is dumpable again.
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("the kernel refused PR_SET_DUMPABLE")
    # The kernel lets commands send process 1 only signals that it handles, and Python handles this one.
    libc.signal(_SIGINT, None)
    memory_bytes, processes, tasks, disk_bytes = map(int, sys.argv[1:5])
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    serve(_Limits(memory_bytes, processes, disk_bytes, sys.argv[5:]))


if __name__ == "__main__":
    main()
