"""Untrusted programs in a process of their own.

What holds for such a program, whatever it does (docs/rollouts.md says it for users):

* It reads Python's and the system's software and nothing else: no home, no project, no ``/proc``, no
  ``/tmp`` but a folder of its own, which is deleted afterwards. (Landlock)
* It has no network, starts no process, signals and inspects none. (seccomp)
* It has no privileges, not even root's. (capabilities)
* It is killed at its time; memory, file size and open files are limited. (resource limits)
"""

import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from services.rollout.rewards import landlock, seccomp

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
    reads_files: bool = False
    """Whether it may read what this user can read. Needed where the kernel has no Landlock."""


_LAUNCHER = """\
import os, resource, sys
from services.rollout.rewards import confine
seconds, memory_bytes, reads_files, path = *map(int, sys.argv[1:4]), sys.argv[4]
# At the soft limit comes a signal that tells of the limit; at the hard one SIGKILL, which could be anybody's.
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 60))
for limit, value in (
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
confine.confine(os.getcwd(), reads_files=bool(reads_files))
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
        RuntimeError: If this host cannot deny it the network, or files.
    """
    if not seccomp.is_supported():
        raise RuntimeError(
            "code_tests needs Linux on x86_64 or aarch64, to keep programs off the network"
        )
    if not limits.reads_files and not landlock.is_supported():
        raise RuntimeError(
            "code_tests needs a kernel with Landlock (Linux 5.13, enabled by lsm=), to keep programs off "
            "files; set the reward's argument reads_files to true if this user can read nothing secret"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as output,
    ):
        path = Path(folder) / "program.py"
        path.write_text(source, encoding="utf-8")
        seconds = max(1, round(limits.seconds))
        process = subprocess.Popen(  # noqa: S603 -- running what the model wrote is the purpose
            [
                *(sys.executable, "-c", _LAUNCHER, str(seconds), str(limits.memory_bytes)),
                *(str(int(limits.reads_files)), str(path)),
            ],
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
