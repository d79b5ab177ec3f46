"""vLLM's processes on a GPU: the engine's, forked from the server that has imported vLLM, and its workers.

Each is killed when the process that started it ends. The kernel's parent-death signal cannot do that: the
engine's process is a child of the fork server, which lives as long as any process that it forked.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from typing import Any, Final, cast

_EXECUTOR: Final = "vllm.v1.executor.multiproc_executor"


class _EngineProcess(ForkServerProcess):
    _parent_pid: int

    def run(self) -> None:
        _die_with(self._parent_pid)
        # The arguments of this process have imported the executor if the engine has workers.
        if (executor := sys.modules.get(_EXECUTOR)) is not None:
            cast("Any", executor).get_mp_context = WorkerContext
        super().run()


class EngineContext(ForkServerContext):
    """Context whose processes are killed when the process that started them ends, in whatever way."""

    Process = _EngineProcess


class _WorkerProcess(ForkProcess):
    _parent_pid: int

    def run(self) -> None:
        _die_with(self._parent_pid)
        super().run()


class WorkerContext(ForkContext):
    """Multiprocessing context of an engine's workers: forked with its imports, and killed with its process.

    vLLM's own workers notice that their engine's process has ended only after they have loaded the model.
    """

    Process = _WorkerProcess


def _die_with(pid: int) -> None:
    """Kills this process when another one ends; Linux only."""

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended before
            wait([os.pidfd_open(pid)])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
