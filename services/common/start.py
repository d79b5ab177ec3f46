"""Runs a program as the first process of a container: ``python -m services.common.start services.rollout``.

The kernel drops a signal to that process unless it has a handler, and a program installs its own only after
it has imported its libraries and loaded its model. A pod that is deleted before would last until its grace
period ends.
"""

import runpy
import signal
import sys

_EXIT_CODE = 128 + signal.SIGTERM  # as of a process that the signal killed


def main() -> None:
    """Runs the module that the first argument names; the others are its arguments."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_CODE))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
