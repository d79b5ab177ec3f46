"""Untrusted programs in a process of their own.

What holds for such a program, whatever it does (docs/rollouts.md says it for users):

* It reads Python's and the system's software and nothing else: no home, no project, no ``/proc``, no
  ``/tmp`` but a folder of its own, which is deleted afterwards. (Landlock, bubblewrap)
* It has no network and starts no process; it neither sees others nor acts on them. (seccomp, bubblewrap)
* It has no privileges, not even root's. (capabilities)
* It is killed at its time; memory, file size and open files are limited. (resource limits)
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.rewards import bubblewrap, landlock, seccomp

_MAX_OUTPUT_BYTES = 1 << 20
_KILLS = (signal.SIGKILL, signal.SIGTERM)
_KILLED = {*(-kill for kill in _KILLS), *(128 + kill for kill in _KILLS)}
"""As a process says it, and as bubblewrap does."""


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
    """Whether it may read what this user can read. Needed where the host has neither Landlock nor
    bubblewrap."""


# A part is read when its turn comes: no frame, constant or source of an earlier one holds it.
_LAUNCHER = """\
import os, resource, sys
from services.rollout.rewards import confine
seconds, memory_bytes, reads_files, parts = map(int, sys.argv[1:])
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
sys.argv = ["program.py"]
names = {"__name__": "__main__"}
while size := int.from_bytes(os.read(parts, 8), "big"):
    exec(compile(os.read(parts, size), "program.py", "exec"), names)
"""


def run_python(parts: Sequence[str], given: str, limits: Limits) -> str | None:
    """Run a Python program.

    Args:
        parts: Of the program: they run one after the other and share their names. None is in the memory of
            the process before those in front of it have ended.
        given: Its standard input.
        limits: What it may use.

    Returns:
        Its standard output, or None if it failed, took too long or printed too much.

    Raises:
        SandboxKilledError: If something else killed it.
        RuntimeError: If this host cannot deny it the network, or files.
    """
    is_wrapped = bubblewrap.is_usable()
    _check_host(limits, is_wrapped=is_wrapped)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile(buffering=0) as output,
        tempfile.TemporaryFile() as given_parts,
    ):
        for part in parts:
            content = part.encode()
            given_parts.write(len(content).to_bytes(8, "big") + content)
        given_parts.flush()
        given_parts.seek(0)
        seconds = max(1, round(limits.seconds))
        process = subprocess.Popen(  # noqa: S603 -- running what the model wrote is the purpose
            [
                *(bubblewrap.prefix(folder) if is_wrapped and not limits.reads_files else ()),
                *(sys.executable, "-c", _LAUNCHER, str(seconds), str(limits.memory_bytes)),
                *(str(int(limits.reads_files)), str(given_parts.fileno())),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            pass_fds=(given_parts.fileno(),),
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(given, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        if process.returncode in _KILLED:
            raise SandboxKilledError(
                f"the program was killed (status {process.returncode}), not by its limits; is the host out "
                "of memory?"
            )
        output.seek(0)
        text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
        return text if process.returncode == 0 else None


def _check_host(limits: Limits, *, is_wrapped: bool) -> None:
    if not seccomp.is_supported():
        raise RuntimeError(
            "code_tests needs Linux on x86_64 or aarch64, to keep programs off the network"
        )
    if not (limits.reads_files or is_wrapped or landlock.is_supported()):
        raise RuntimeError(
            "code_tests needs bubblewrap, or a kernel with Landlock (Linux 5.13, enabled by lsm=), to keep "
            "programs off files; set the reward's argument reads_files to true if this user can read nothing "
            "secret"
        )
