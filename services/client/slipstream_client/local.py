"""Default controller: the one in the environment, or the one that runs on this machine."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream_client.request import ApiError

_UP_FILE = Path("runs") / "up.json"


def find_url(url: str = "") -> str:
    """Returns a controller's address: ``url``, ``SLIPSTREAM_URL``, or the one that ``slipstream up`` started.

    Raises:
        ApiError: If no controller, or more than one, is found.
    """
    if explicit := url or os.environ.get("SLIPSTREAM_URL", ""):
        return explicit
    if _UP_FILE.exists():
        return str(json.loads(_UP_FILE.read_text(encoding="utf-8"))["url"])
    running = sorted(address for address, owner in _started() if _is_running(owner))
    if len(running) > 1:
        raise ApiError(
            f"several controllers run on this machine: {', '.join(running)}; choose one with url"
        )
    if not running:
        raise ApiError(
            "no controller found: start one with 'slipstream up', or set url or SLIPSTREAM_URL"
        )
    return running[0]


def find_token(url: str) -> str:
    """Returns ``SLIPSTREAM_TOKEN``, or the token of a controller that this user started here, or ""."""
    if token := os.environ.get("SLIPSTREAM_TOKEN", ""):
        return token
    address = f"http://{urlsplit(url).netloc}"
    return next((str(owner.get("token", "")) for base, owner in _started() if base == address), "")


def _started() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields address and recorded facts of each controller that this user started on this machine."""
    folder = Path.home() / ".slipstream" / "tokens"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            owner = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(owner, dict):
            yield f"http://{path.name}", owner


def _is_running(owner: dict[str, Any]) -> bool:
    """Returns True if the process that started a controller still runs on this machine."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return False
    return True
