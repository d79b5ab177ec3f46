"""Fork server: forks processes from a parent that has already imported their modules.

``python -m services.common.fork_server MODULE...`` imports the modules, and then executes the
commands on standard input in command. Each is a line with a JSON object, answered by one line on
standard output:

    {"module": "services.rollout", "environment": {...}, "log": "rollout-0.log"}    {"pid": 17}
    {"ended": 17}                                                                   {"status": -9}

The first starts the equivalent of ``python -m services.rollout``, in its own session, with exactly that
environment, and appends its output to that file. The second requests the status of an ended process; until
then its pid is not reused. The server ends with standard input; the processes that it started live on.

The server has one thread: a fork has only the thread that forked, so locks that other threads hold
would stay locked in it.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

# Fields of /proc/self/stat, after the program's name, with the bounds of the command line in
# memory.
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46


class _CommandPipe:
    """Reads commands and writes answers.

    Redirects the process's own standard output to standard error and its input to nothing, so that
    imports cannot disturb the protocol.
    """

    def __init__(self) -> None:
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        self._hangup = select.poll()
        self._hangup.register(self._input.fileno(), 0)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def is_over(self) -> bool:
        """Returns True if the client has gone, even if unread commands are left."""
        return bool(self._hangup.poll(0))

    def next(self) -> dict[str, Any] | None:
        """Returns the next command; None at the end."""
        line = self._input.readline()
        if not line or self.is_over():
            return None
        command: dict[str, Any] = json.loads(line)
        return command

    def answer(self, **content: int | str | None) -> None:
        self._output.write(json.dumps(content).encode() + b"\n")

    def close(self) -> None:
        """Closes both ends in a fork."""
        self._input.close()
        self._output.close()


def serve(modules: Sequence[str]) -> str | None:
    """Imports modules and forks on command.

    Args:
        modules: Modules to import. Those that cannot be imported are left to the forks.

    Returns:
        In a fork, the module to run. In the server, None after its last command; if an import has
        initialized CUDA, None at once, without any fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = _CommandPipe()
    # Imports produce no garbage. Collection would take a quarter of the time, and would later write
    # to memory that all forks share.
    gc.disable()
    for module in modules:
        if commands.is_over():
            return None
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"fork server: cannot import {module}: {error}", file=sys.stderr)  # noqa: T201
    if _has_initialized_cuda():
        print("fork server: an import has initialized CUDA", file=sys.stderr)  # noqa: T201
        return None
    gc.freeze()
    while (command := commands.next()) is not None:
        if "ended" in command:
            commands.answer(status=_status(command["ended"]))
            continue
        try:
            with Path(command["log"]).open("ab") as log:
                pid = os.fork()
                if pid == 0:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
        except OSError as error:
            commands.answer(error=str(error))
            continue
        if pid == 0:
            commands.close()
            _become_worker(command["module"], command["environment"])
            return str(command["module"])
        commands.answer(pid=pid)
    return None


def _has_initialized_cuda() -> bool:
    """Returns True if forks cannot use GPUs. torch reports this in a forked process only."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))  # noqa: SLF001 -- there is no public name
    return _status(pid) != 0


def _status(pid: int) -> int | None:
    """Returns the exit status of an ended child, negative for a signal; None if it is no child."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _become_worker(module: str, environment: Mapping[str, str]) -> None:
    """Gives this fork the state of a newly started process that runs the module."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module]
    set_command_line(sys.executable, "-m", module)
    # `random` reseeds itself after a fork, NumPy does not.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(random.SystemRandom().getrandbits(32))
    # OpenMP read its variable when it was loaded.
    num_threads = environment.get("OMP_NUM_THREADS", "")
    if (torch := sys.modules.get("torch")) is not None and num_threads.isdecimal():
        torch.set_num_threads(int(num_threads))
    gc.enable()


def set_command_line(*arguments: str) -> None:
    """Replaces the command line that ``ps`` and similar tools show, as far as it fits."""
    facts = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(facts[_ARGUMENTS_BEGIN]), int(facts[_ARGUMENTS_END])
    if room := end - begin:
        text = "\0".join(arguments).encode()[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


def main() -> None:
    """Runs the server, and the module in each fork."""
    module = serve(sys.argv[1:])
    if module is not None:
        # No frame of the server is above this one, so the process ends like any other.
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
