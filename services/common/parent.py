"""Ends a process with its parent. Has few imports, because sandboxed programs load it."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, however that ends; Linux only.

    More exactly: when the thread that started it ends, so start such processes in a thread that lives as
    long as its process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel rejected the parent-death signal")
