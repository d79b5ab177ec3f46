"""The controller that is meant where none is named: the environment's, or one that runs on this machine."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream_client.problems import ApiError

_UP_FILE = Path("runs") / "up.json"


def find_url(url: str = "") -> str:
    """Address of a controller: the given one, SLIPSTREAM_URL, or what ``slipstream up`` started.

    Raises:
        ApiError: If there is none, or there are several.
    """
    if found := url or os.environ.get("SLIPSTREAM_URL", ""):
        return found
    if _UP_FILE.exists():
        return str(json.loads(_UP_FILE.read_text(encoding="utf-8"))["url"])
    running = sorted(address for address, owner in _started() if _lives(owner))
    if len(running) > 1:
        raise ApiError(f"several controllers run here: {', '.join(running)}; say which with url")
    if not running:
        raise ApiError(
            "no controller is known: start one with 'slipstream up', or give url or SLIPSTREAM_URL"
        )
    return running[0]


def find_token(url: str) -> str:
    """SLIPSTREAM_TOKEN, or the token of a controller that this user started here; else empty."""
    if token := os.environ.get("SLIPSTREAM_TOKEN", ""):
        return token
    address = f"http://{urlsplit(url).netloc}"
    return next(
        (str(owner.get("token", "")) for found, owner in _started() if found == address), ""
    )


def _started() -> Iterator[tuple[str, dict[str, Any]]]:
    """Addresses of the controllers that this user started here, and what was written down of each."""
    folder = Path.home() / ".slipstream" / "tokens"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            owner = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(owner, dict):
            yield f"http://{path.name}", owner


def _lives(owner: dict[str, Any]) -> bool:
    """Whether the process that started a controller still runs on this machine."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return False
    return True
