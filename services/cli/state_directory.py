"""State of this machine: the lock of the state directory, and the tokens of running controllers.

Only one command may use the directory, because the controllers of two commands would take over each
other's runs. Other users cannot read the tokens.
"""

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
from urllib.parse import urlsplit

from services.common.host import is_gone, make_private_folder, process_identity

_FILE = "command.lock"


class StateInUseError(RuntimeError):
    """Reports that this command cannot use the state directory; the message has the cause and a fix."""


@contextmanager
def lock_state_directory(state_directory: Path) -> Iterator[None]:
    """Locks a state directory until the block or this process ends.

    Raises:
        StateInUseError: If another process has locked it, or it is not writable.
    """
    try:
        make_private_folder(state_directory)
        opened = (state_directory / _FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise StateInUseError(
            f"{state_directory} cannot be written ({error.strerror}); use another --state-directory"
        ) from error
    with opened as lock:
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
    except (OSError, ValueError, KeyError, TypeError):  # the owner has not written the file yet
        return "another process"


_PREFIX = "slipstream-"
_OWNER = "owner"


@contextmanager
def process_folder() -> Iterator[Path]:
    """Yields a temporary folder for secrets; also removes folders that killed processes left."""
    for old_folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_left_behind(old_folder):
            shutil.rmtree(old_folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        (folder / _OWNER).write_text(json.dumps(process_identity()), encoding="utf-8")
        yield folder


def _is_left_behind(folder: Path) -> bool:
    """Returns True for a folder of this user whose process is known to have ended."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        return is_gone(json.loads((folder / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def known_token(url: str, token: str) -> Iterator[None]:
    """Stores the token of a started controller until the block ends.

    Also removes tokens that killed processes left.
    """
    path = _path(url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    for token_file in path.parent.iterdir():
        if _lives(token_file) is False:
            token_file.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"token": token, **process_identity()}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_token(url: str) -> str:
    """Returns the token of the controller at an address; empty if it is not stored here or not readable."""
    try:
        return str(json.loads(_path(url).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def running_controllers() -> list[str]:
    """Returns the addresses of the running controllers that this user started on this machine."""
    paths = sorted(_folder().iterdir()) if _folder().is_dir() else []
    return [f"http://{path.name}" for path in paths if _lives(path)]


def _lives(path: Path) -> bool | None:
    """Returns True if a token file's controller runs, False if it has ended, None if it is unreadable."""
    try:
        return not is_gone(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(url: str) -> Path:
    return _folder() / urlsplit(url).netloc.replace("/", "_")


def _folder() -> Path:
    return Path.home() / ".slipstream" / "tokens"
