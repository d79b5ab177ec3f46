"""Untrusted programs in a process of their own: limited, without network, killed in time.

The program runs as this user and can read what this user can read: give the rollout pod no secrets.
"""

import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from services.rollout.rewards import seccomp

_MAX_OUTPUT_BYTES = 1 << 20


class SandboxKilledError(RuntimeError):
    """The program was killed from outside its limits, so nothing is known about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float
    """CPU and wall time."""
    memory_bytes: int
    """Address space."""


_LAUNCHER = """\
import os, resource, sys
from services.rollout.rewards import seccomp
seconds, memory_bytes, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for limit, value in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
seccomp.install()
with open(path, encoding="utf-8") as file:
    source = file.read()
os.unlink(path)
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""


def run_python(source: str, given: str, limits: Limits) -> str | None:
    """Run a Python program.

    Args:
        source: The program.
        given: Its standard input.
        limits: What it may use.

    Returns:
        Its standard output, or None if it failed, took too long or printed too much.

    Raises:
        SandboxKilledError: If something else killed it.
        RuntimeError: If this host cannot deny it the network.
    """
    if not seccomp.is_supported():
        raise RuntimeError(
            "code_tests needs Linux on x86_64 or aarch64, to keep programs off the network"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as output,
    ):
        path = Path(folder) / "program.py"
        path.write_text(source, encoding="utf-8")
        seconds = max(1, round(limits.seconds))
        process = subprocess.Popen(  # noqa: S603 -- running what the model wrote is the purpose
            [sys.executable, "-c", _LAUNCHER, str(seconds), str(limits.memory_bytes), str(path)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(given, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        if process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            raise SandboxKilledError(
                f"the program was killed by signal {-process.returncode}, not by its limits; is the "
                "host out of memory?"
            )
        output.seek(0)
        text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
        return text if process.returncode == 0 else None
