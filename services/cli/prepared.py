"""Forks of this process that import a service and get its environment later.

They share the modules that the command has imported: pydantic, gRPC and the specification cost each process
half a second. Linux only. A process may fork only before it has threads.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context, process
from pathlib import Path

from services.common.fork_server import set_command_line
from services.controller.launch.worker_process import AdoptedProcess


class PreparedProcess:
    """A process in its own session that imports a program at once, and runs it when :meth:`run` is called.

    Args:
        module: Package of the program, for ``python -m``.
        umask: File mode creation mask of the process.
        before: Called in the process before its imports.
    """

    def __init__(
        self, module: str, *, umask: int, before: Callable[[], None] | None = None
    ) -> None:
        reader, self._input = os.pipe()
        self._process = get_context("fork").Process(
            target=_wait_and_run, args=(module, reader, umask, before)
        )
        self._process.start()
        # Otherwise the command's exit waits for it, which itself waits for the end of its input.
        process._children.discard(self._process)  # type: ignore[attr-defined]  # noqa: SLF001
        os.close(reader)
        self._end: AdoptedProcess | None = None

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def run(self, environment: Mapping[str, str], log: Path) -> None:
        """Runs the program with exactly this environment; appends its output to the file.

        Raises:
            OSError: If the process has ended.
        """
        self._end = AdoptedProcess(self.pid)
        command = {"environment": dict(environment), "log": str(log)}
        with open(self._input, "wb", closefd=False) as commands:
            commands.write(json.dumps(command).encode() + b"\n")

    def terminate(self) -> None:
        self._process.terminate()

    async def wait(self) -> int:
        """Waits until it has ended after :meth:`run`; returns its exit code, negative for a signal."""
        assert self._end is not None
        await self._end.wait()
        self._process.join()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """Ends it at once and waits for its end."""
        self._process.kill()  # before its input ends, at which it would exit with 0
        os.close(self._input)
        self._process.join()


def _wait_and_run(module: str, reader: int, umask: int, before: Callable[[], None] | None) -> None:
    """Becomes an equivalent of ``python -P -m MODULE`` whose input is the rest of the pipe."""
    os.setsid()
    os.umask(umask)
    os.dup2(reader, 0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    # Also inputs of other prepared processes. Not all numbers: a limit of 2 ** 30 would cost minutes.
    os.closerange(3, 1 + max(int(path.name) for path in Path("/proc/self/fd").iterdir()))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 -- until it ends
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__
    if not sys.flags.safe_path:
        del sys.path[0]
    if before is not None:
        before()
    importlib.import_module(f"{module}.__main__")
    del sys.modules[f"{module}.__main__"]  # it runs once more, as the main program
    line = _read_line(0)
    if not line:
        return
    command = json.loads(line)
    with Path(command["log"]).open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.argv = [module]
    set_command_line(sys.executable, "-P", "-m", module)
    # Otherwise tools show the name of the command that was started.
    with suppress(OSError):
        Path("/proc/self/comm").write_text(Path(sys.executable).name, encoding="utf-8")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001 -- multiprocessing leaves them out


def _read_line(descriptor: int) -> bytes:
    """Reads a line and no byte after it; returns nothing if the input ends before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(descriptor, 1)):
            return b""
        line += byte
    return line
