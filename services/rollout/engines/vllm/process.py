"""vLLM's processes on a GPU: the engine's, forked from the server that has imported vLLM, and its workers.

Each is killed when the process that started it ends. The kernel's parent-death signal does not serve here:
the engine's process is a child of that server, which lives as long as one of the processes that it forked.
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
        # The arguments of this process have imported it if the engine has workers.
        if (executor := sys.modules.get(_EXECUTOR)) is not None:
            cast("Any", executor).get_mp_context = WorkerContext
        super().run()


class EngineContext(ForkServerContext):
    """Context whose processes are killed when the process that started them ends, however that ends."""

    Process = _EngineProcess


class _WorkerProcess(ForkProcess):
    _parent_pid: int

    def run(self) -> None:
        _die_with(self._parent_pid)
        super().run()


class WorkerContext(ForkContext):
    """Context of an engine's workers: forked with the engine's imports, and killed with its process.

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
