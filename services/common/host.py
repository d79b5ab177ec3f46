"""What identifies this host, so that processes on it can use what they share."""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def host_id() -> str:
    """A short digest of host name and boot: equal for all processes of one host, until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()}:{start}".encode()).hexdigest()[:16]


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path of a socket: its own may be longer than the 107 bytes that an address holds."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
