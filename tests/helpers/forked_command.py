"""Runs commands as forks of a process that has done their imports, which take most of a short command's time.

A fork is a separate process with its own arguments, environment, folder and outputs. It runs
``services.cli.main`` as ``python -m`` does.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import process
from pathlib import Path

from services.common.fork_server import _become_worker
from tests.helpers.forks import PROCESSES, preload

preload(
    "services.cli.commands.control",
    "services.cli.commands.inspect",
    "services.cli.commands.local",
    "services.extras.samples.command",
    "services.cli.commands.spec",
    "matplotlib.backends.backend_agg",
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
    "jinja2.sandbox",
    "httpcore",
)
_MODULE = "services.cli.main"
_starting = threading.Lock()


def _of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that imported modules may read, without Slipstream's, pytest's and torch's."""
    prefixes = ("SLIPSTREAM_", "PYTEST_", "TORCH")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


_IMPORTS = _of_imports({**os.environ, "OMP_NUM_THREADS": "1"})


def run_forked(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs a command line of ``services.cli.main`` to its end.

    Args:
        command: ``sys.argv`` of the command.
        environment: The whole environment of the command.
        timeout: Seconds after which the command is killed.

    Returns:
        The ended command; None if this environment could change the imports, so that the command needs a
        process that imports its modules itself.

    Raises:
        subprocess.TimeoutExpired: If the command was killed.
    """
    if _of_imports(environment) != _IMPORTS:
        return None
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        fork = PROCESSES.Process(
            target=_run, args=(list(command), dict(environment), folder, out, err)
        )
        with _starting:
            fork.start()
            # Else the next start, in any thread, would read its exit status.
            process._children.discard(fork)  # type: ignore[attr-defined]
        fork.join(timeout)
        if (status := fork.exitcode) is None:
            fork.kill()
            fork.join()
            raise subprocess.TimeoutExpired(
                list(command), timeout, out.read_text(), err.read_text()
            )
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


def _run(
    command: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path
) -> None:
    for descriptor, path in ((1, out), (2, err)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    _become_worker(_MODULE, environment)
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.argv = command
    sys.modules.pop(_MODULE, None)
    try:
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    except Exception:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
