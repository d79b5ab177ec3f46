"""Lock of the state directory: only one command may use it, because two would take each other's runs."""

import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.host import is_gone, process_identity

_FILE = "command.lock"


class StateInUseError(RuntimeError):
    """Reports that another command uses the state directory; the message names it and a fix."""


@contextmanager
def lock_state_directory(state_directory: Path) -> Iterator[None]:
    """Locks a state directory until the block or this process ends.

    Raises:
        StateInUseError: If another process has locked it.
    """
    state_directory.mkdir(parents=True, exist_ok=True)
    with (state_directory / _FILE).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateInUseError(
                f"{state_directory} is in use by {_owner(state_directory / _FILE)}; stop it (Ctrl-C pauses "
                "its runs), use another --state-directory, or, if it is 'slipstream up', add the run to it "
                "with 'slipstream submit'"
            ) from None
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid(), "command": sys.argv[1:]}))
        lock.flush()
        yield


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner['pid']} (slipstream {' '.join(owner['command'])})"
    except (OSError, ValueError, KeyError, TypeError):  # it is only writing it
        return "another process"


_PREFIX = "slipstream-"
_OWNER = "owner"


@contextmanager
def process_folder() -> Iterator[Path]:
    """Yields a temporary folder for secrets; also removes folders that killed processes left."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_left_behind(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        (folder / _OWNER).write_text(json.dumps(process_identity()), encoding="utf-8")
        yield folder


def _is_left_behind(folder: Path) -> bool:
    """Returns True for a folder of this user whose process is known to have ended."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        return is_gone(json.loads((folder / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False
