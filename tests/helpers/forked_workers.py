"""Starts workers of pytest-xdist as forks of a process that has collected the tests.

Else each worker would import their modules and collect them itself. The process is a fork server of
``multiprocessing``, which imports ``tests.helpers.imported_tests`` first.
"""

import atexit
import json
import multiprocessing
import os
import sys
from multiprocessing import forkserver, process, reduction
from typing import Any

from execnet import gateway_base, gateway_io

COLLECTION = "SLIPSTREAM_TESTS_COLLECTION"
"""Variable with the arguments of the collection, as JSON."""
_CONTEXT = multiprocessing.get_context("forkserver")


def fork_workers(arguments: tuple[str, ...], num_workers: int) -> None:
    """Lets the workers of this process's pytest start as forks.

    Args:
        arguments: Command line of pytest.
    """
    os.environ[COLLECTION] = json.dumps(
        {"arguments": arguments, "num_workers": num_workers, "sys_path": sys.path}
    )
    _CONTEXT.set_forkserver_preload(["tests.helpers.imported_tests"])
    create_io = gateway_io.create_io

    def create(spec: Any, execmodel: gateway_base.ExecModel) -> Any:
        is_local = spec.popen and not (spec.python or spec.via)
        return _Worker(execmodel) if is_local else create_io(spec, execmodel)

    gateway_io.create_io = create


class _Worker(gateway_base.Popen2IO):
    """Process of a worker, with the methods of ``execnet.gateway_io.Popen2IOMaster``."""

    def __init__(self, execmodel: gateway_base.ExecModel) -> None:
        commands, writer = os.pipe()
        reader, answers = os.pipe()
        self._process = _CONTEXT.Process(target=_Work(commands, answers))
        self._process.start()
        os.close(commands)
        os.close(answers)
        super().__init__(os.fdopen(writer, "wb"), os.fdopen(reader, "rb"), execmodel)
        self.kill = self._process.kill

    def wait(self) -> int | None:
        """Waits for the end of the worker and returns its exit status."""
        self._process.join()
        return self._process.exitcode


class _Work:
    """Executes what ``execnet`` sends, as ``python -c`` with its bootstrap line does."""

    def __init__(self, commands: int, answers: int) -> None:
        self._descriptors = (commands, answers)

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(descriptor) for descriptor in self._descriptors]

    def __setstate__(self, handles: list[Any]) -> None:
        self._descriptors = (handles[0].detach(), handles[1].detach())

    def __call__(self) -> None:
        del os.environ[COLLECTION]
        process._parent_process = None  # type: ignore[attr-defined]
        # A fork server of a test is the one of this process, which has the imports.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        for standard, descriptor in enumerate(self._descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        atexit._run_exitfuncs()  # which multiprocessing leaves out
