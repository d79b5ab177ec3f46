"""What identifies this host, so that processes on it can use what they share."""

import hashlib
import socket
from pathlib import Path


def host_id() -> str:
    """A short digest of host name and boot: equal for all processes of one host, until it reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()}:{start}".encode()).hexdigest()[:16]
