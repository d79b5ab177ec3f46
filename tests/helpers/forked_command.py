"""Runs commands as forks of a process that has done their imports, which take most of a short command's time.

A fork is a separate process with its own arguments, environment, folder and outputs. It runs this module as
``__main__``, which runs ``services.cli.main`` as ``python -m`` does.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parents[2]
_TASK = "SLIPSTREAM_TESTS_COMMAND"
_MODULES = (
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
_START_S = 120.0
_local = threading.local()


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
    server: _Server | None = getattr(_local, "server", None)
    if server is None:
        server = _local.server = _Server()
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        task = {"argv": list(command), "folder": str(folder), "out": str(out), "err": str(err)}
        try:
            status = server.run({**environment, _TASK: json.dumps(task)}, log=err, timeout=timeout)
        except BaseException:
            del _local.server
            server.close()
            raise
        if status is None:
            raise subprocess.TimeoutExpired(
                list(command), timeout, out.read_text(), err.read_text()
            )
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


class _Server:
    """Fork server with the commands' modules imported; ``services.common.fork_server`` has its protocol."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.common.fork_server", *_MODULES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_REPOSITORY,
            env=_IMPORTS,
            bufsize=0,
        )

    def run(self, environment: Mapping[str, str], *, log: Path, timeout: float) -> int | None:
        """Runs a fork; returns its exit status, or None if it was killed after ``timeout`` seconds."""
        log.touch()
        self._ask(module=__name__, environment=dict(environment), log=str(log))
        answer = self._answer(_START_S)
        assert answer is not None, "the fork server does not answer"
        pid = answer["pid"]
        self._ask(ended=pid)
        ended = self._answer(timeout)
        if ended is None:
            os.kill(pid, signal.SIGKILL)
            self._answer(_START_S)
            return None
        status: int = ended["status"]
        return status

    def close(self) -> None:
        """Ends the server."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def _answer(self, timeout: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            return None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def main() -> None:
    """Runs the command in this fork."""
    task = json.loads(os.environ.pop(_TASK))
    for descriptor, name in ((1, "out"), (2, "err")):
        with Path(task[name]).open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(task["folder"])
    sys.path[0] = task["folder"]
    sys.argv = task["argv"]
    runpy.run_module("services.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
