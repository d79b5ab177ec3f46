"""Which process something belongs to, written down: process ids are used again, start times are not."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def identity_of(pid: int) -> dict[str, Any]:
    """What is written down of a process that lives.

    Raises:
        psutil.NoSuchProcess: If it does not.
    """
    start_time = psutil.Process(pid).create_time()
    return {"host": socket.gethostname(), "pid": pid, "start_time": start_time}


def own_identity() -> dict[str, Any]:
    """What is written down of this process."""
    return identity_of(os.getpid())


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Whether a process of this host still runs."""
    try:
        process = psutil.Process(int(identity["pid"]))
        is_same = process.create_time() == identity["start_time"]
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(identity: Mapping[str, Any]) -> bool:
    """Whether a process ran on this host and has ended; of other hosts nothing is known."""
    return identity["host"] == socket.gethostname() and not is_alive(identity)
