"""vLLM's engine process on a GPU: forked from the server that has imported vLLM, killed with its rollout.

The kernel's parent-death signal does not serve here: the process is a child of that server, which lives
as long as one of the processes that it forked.
"""

import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess


class _EngineProcess(ForkServerProcess):
    _parent_pid: int

    def run(self) -> None:
        threading.Thread(target=_die_with, args=(self._parent_pid,), daemon=True).start()
        super().run()


class EngineContext(ForkServerContext):
    """Context whose processes are killed when the process that started them ends, however that ends."""

    Process = _EngineProcess


def _die_with(pid: int) -> None:
    """Waits until a process ends, and kills this one; Linux only."""
    with suppress(ProcessLookupError):  # it has ended before
        wait([os.pidfd_open(pid)])
    os.kill(os.getpid(), signal.SIGKILL)
