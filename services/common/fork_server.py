"""Starts processes that have their imports done: forks of this one, which imports what they will need.

``python -m services.common.fork_server MODULE...`` imports the modules, and then does what the lines of
standard input say, one after the other. Each is a JSON object and is answered by one on standard output:

    {"module": "services.rollout", "environment": {...}, "log": "rollout-0.log"}    {"pid": 17}
    {"ended": 17}                                                                   {"status": -9}

The first starts what ``python -m services.rollout`` would, in a session of its own, with that environment and
no other, and with its output at the end of that file. The second asks for the status of a process that has
ended; until then its id belongs to nobody else. Standard input's end is this process's end; what it started
lives on.

There is one thread: a fork has only the thread that forked, so locks that others hold stay locked in it.
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

# Where /proc/self/stat says, after the program's name, from where to where the command line lies in memory.
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46


class _Orders:
    """Lines that come in and lines that go out.

    Whatever imports print goes to standard error, and what they read is empty.
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
        """Whether nobody waits for answers, even if orders are left."""
        return bool(self._hangup.poll(0))

    def next(self) -> dict[str, Any] | None:
        """The next order; None if there will be none."""
        line = self._input.readline()
        if not line or self.is_over():
            return None
        order: dict[str, Any] = json.loads(line)
        return order

    def answer(self, **content: int | str | None) -> None:
        """Answer the newest order."""
        self._output.write(json.dumps(content).encode() + b"\n")

    def close(self) -> None:
        """Leave both ends to others."""
        self._input.close()
        self._output.close()


def serve(modules: Sequence[str]) -> str | None:
    """Import modules and fork on order.

    Args:
        modules: What to import. What cannot be imported is left to those who need it.

    Returns:
        In a fork, the module that it shall run; None in the server, once its orders end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = _Orders()
    # Nothing of what is imported is garbage. Looking for some takes a quarter of the time, and would later
    # write to memory that all forks share.
    gc.disable()
    for module in modules:
        if orders.is_over():
            return None
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"fork server: {module} is not imported: {error}", file=sys.stderr)  # noqa: T201
    gc.freeze()
    while (order := orders.next()) is not None:
        if "ended" in order:
            orders.answer(status=_status(order["ended"]))
            continue
        try:
            with Path(order["log"]).open("ab") as log:
                pid = os.fork()
                if pid == 0:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
        except OSError as error:
            orders.answer(error=str(error))
            continue
        if pid == 0:
            orders.close()
            _become(order["module"], order["environment"])
            return str(order["module"])
        orders.answer(pid=pid)
    return None


def _status(pid: int) -> int | None:
    """The exit status of a child that ended, negative for a signal; None if it is no child."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _become(module: str, environment: Mapping[str, str]) -> None:
    """Make this fork what a process would be that was started to run this module."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module]
    _show(sys.executable, "-m", module)
    # `random` does this by itself, NumPy does not.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(random.SystemRandom().getrandbits(32))
    # OpenMP has read its variable when it was loaded.
    num_threads = environment.get("OMP_NUM_THREADS", "")
    if (torch := sys.modules.get("torch")) is not None and num_threads.isdecimal():
        torch.set_num_threads(int(num_threads))
    gc.enable()


def _show(*arguments: str) -> None:
    """Show a command line to ``ps`` and to all who look for a process by it, as far as there is room."""
    facts = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(facts[_ARGUMENTS_BEGIN]), int(facts[_ARGUMENTS_END])
    if room := end - begin:
        text = "\0".join(arguments).encode()[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


def main() -> None:
    """Entry point of the server, and of each fork."""
    module = serve(sys.argv[1:])
    if module is not None:
        # Above this frame is nothing of the server, so the process ends as any other does.
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
