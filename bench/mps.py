"""CUDA's Multi-Process Service for the processes of a benchmark."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Environment variable with the percentage of the multiprocessors that a process may use."""
_TIMEOUT_S = 20.0


class MpsUnavailableError(RuntimeError):
    """Raised if the service cannot be started; the message has the reason."""


@contextmanager
def serving_mps() -> Iterator[dict[str, str]]:
    """Runs a separate service; yields the environment variables of processes that use it.

    Raises:
        MpsUnavailableError: If it is not installed or does not start.
    """
    if shutil.which(CONTROL) is None:
        raise MpsUnavailableError(f"{CONTROL} is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(name, "pipe")),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(name, "log")),
        }
        for folder in environment.values():
            Path(folder).mkdir()
        every = {**os.environ, **environment}  # noqa: TID251 -- its child inherits it
        started = subprocess.run(
            [CONTROL, "-d"],
            env=every,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if started.returncode != 0:
            raise MpsUnavailableError(
                f"{CONTROL} did not start: {started.stdout}{started.stderr}".strip()
            )
        try:
            yield environment
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [CONTROL],
                    input="quit -t 5\n",
                    env=every,
                    text=True,
                    timeout=_TIMEOUT_S,
                    check=False,
                )
