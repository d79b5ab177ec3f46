"""vLLM's engine process on a GPU: forked from the server that has imported vLLM, killed with its rollout.

The kernel's parent-death signal does not serve here: the process is a child of that server, which lives
as long as one of the processes that it forked.
"""

import os
import select
import signal
import threading
from multiprocessing.context import ForkServerContext, ForkServerProcess


class _EngineProcess(ForkServerProcess):
    _parent_pid: int

    def run(self) -> None:
        _die_with(self._parent_pid)
        super().run()


class EngineContext(ForkServerContext):
    """Context whose processes are killed when the process that started them ends, however that ends."""

    Process = _EngineProcess


def _die_with(pid: int) -> None:
    """Kills this process when another one ends; Linux only."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        _kill_self()
    threading.Thread(target=_kill_after, args=(descriptor,), daemon=True).start()


def _kill_after(descriptor: int) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
