"""Commands of child processes, and their end with their parent.

Has few imports, because sandboxed programs load it.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, however that ends; Linux only.

    More exactly: when the thread that started it ends, so start such processes in a thread that lives as
    long as its process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel rejected the parent-death signal")


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this project with this interpreter.

    ``-P`` keeps the working directory out of the import path: a user's ``json.py`` or ``random.py`` there
    would replace the standard library's.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
