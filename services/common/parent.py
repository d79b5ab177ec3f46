"""Commands of child processes, and their end with their parent.

Has few imports, because sandboxed programs load it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, however that ends; Linux only.

    More exactly: when the thread that started it ends, so start such processes in a thread that lives as
    long as its process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel rejected the parent-death signal")


def disconnect_forks(*descriptors: int) -> None:
    """Replaces descriptors by ``/dev/null`` in every process that user code forks from this one.

    Such a process may return from the user's function. It must then neither answer in this process's place
    nor read its requests.
    """

    def disconnect() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(nothing, descriptor)
        os.close(nothing)

    os.register_at_fork(after_in_child=disconnect)


def call_ending_forks(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a user's function in a thread; ends the processes that it forks and that return from it.

    The thread is the only one of such a process, which would wait for further work forever.
    """
    process = os.getpid()
    try:
        return function(*arguments, **keywords)
    finally:
        if os.getpid() != process:
            os._exit(0)  # noqa: TID251 -- a fork has no task group


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this project with this interpreter.

    ``-P`` keeps the working directory out of the import path: a user's ``json.py`` or ``random.py`` there
    would replace the standard library's.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
