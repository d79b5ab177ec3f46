"""Tokens of the controllers that this user started on this machine, by address.

Other users cannot read them.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from services.common.host import is_gone, process_identity


@contextmanager
def known(url: str, token: str) -> Iterator[None]:
    """Stores the token of a started controller until the block ends.

    Also removes tokens that killed processes left.
    """
    path = _path(url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    for left in path.parent.iterdir():
        if _lives(left) is False:
            left.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"token": token, **process_identity()}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find(url: str) -> str:
    """Returns the token of the controller at an address; empty if it is not stored here or not readable."""
    try:
        return str(json.loads(_path(url).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def running() -> list[str]:
    """Returns the addresses of the running controllers that this user started on this machine."""
    found = sorted(_folder().iterdir()) if _folder().is_dir() else []
    return [f"http://{path.name}" for path in found if _lives(path)]


def _lives(path: Path) -> bool | None:
    """Returns True if the controller of a token file runs; None if the file cannot be read."""
    try:
        return not is_gone(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(url: str) -> Path:
    return _folder() / urlsplit(url).netloc.replace("/", "_")


def _folder() -> Path:
    return Path.home() / ".slipstream" / "tokens"
