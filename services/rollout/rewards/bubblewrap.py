"""Runs a sandboxed program in its own namespaces, if the host has a working bubblewrap.

Bubblewrap adds to the program's own restrictions: no other process is visible, no network device
exists, and no file except those listed here. Kernels and container runtimes may forbid user
namespaces; bubblewrap is then not used.
"""

import functools
import logging
import shutil
import subprocess
from pathlib import Path

from services.rollout.rewards.confine import software

_logger = logging.getLogger(__name__)
_PROGRAM = "bwrap"
_ALONE = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
_TRIAL_FOLDER = ("--size", "4096", "--tmpfs", "/tmp")  # noqa: S108 -- inside its own namespace
_OURS = Path(__file__).parents[2]
_TRIAL_TIMEOUT_S = 10.0


@functools.cache
def is_usable() -> bool:
    """Returns True if bubblewrap is installed and works here; tests it once."""
    found = shutil.which(_PROGRAM)
    if found is None:
        _logger.info("bubblewrap is not installed; seccomp and Landlock confine programs")
        return False
    trial = subprocess.run(  # noqa: S603 -- a program of the host
        [found, *_ALONE, "--ro-bind", "/", "/", "--dev", "/dev", *_TRIAL_FOLDER, "true"],
        capture_output=True,
        text=True,
        timeout=_TRIAL_TIMEOUT_S,
        check=False,
    )
    if trial.returncode != 0:
        _logger.warning(
            "bubblewrap does not work here; only seccomp and Landlock confine programs: %s",
            trial.stderr.strip(),
        )
    return trial.returncode == 0


def prefix(folder: str, *, disk_bytes: int, info_fd: int) -> list[str]:
    """Returns arguments to put before a command, so that it sees software, one folder and nothing else.

    Args:
        folder: Working folder that it may write to: a file system in memory, which ends with the namespaces.
        disk_bytes: Size of that file system.
        info_fd: File descriptor to which bubblewrap writes ``{"child-pid": ...}``, the first process of the
            namespaces.
    """
    readable = [*software(), _OURS]
    binds = [part for path in readable for part in ("--ro-bind-try", str(path), str(path))]
    return [
        *(shutil.which(_PROGRAM) or _PROGRAM, *_ALONE, *binds, "--info-fd", str(info_fd)),
        *("--dev", "/dev", "--size", str(disk_bytes), "--tmpfs", folder, "--chdir", folder, "--"),
    ]
