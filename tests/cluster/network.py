"""Network namespace of the cluster, which this process enters, so that the host's network does not change."""

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE_IP = "10.99.0.1"
SECOND_NODE_IP = "10.99.0.2"
SERVICE_RANGE = "10.96.0.0/16"
POD_RANGE = "10.244.0.0/16"
"""Addresses of the pods of all nodes; each node has a part."""

_CLONE_NEWNET = 0x40000000


@contextmanager
def own_network(name: str) -> Iterator[None]:
    """Enters a new network namespace, which sockets and child processes of the block use.

    The namespace has no route to the outside, so several clusters can use the same addresses.
    """
    path = Path("/run/netns") / name
    if path.exists():
        _ip("netns", "delete", name)
    _ip("netns", "add", name)
    try:
        with Path("/proc/thread-self/ns/net").open("rb") as before, path.open("rb") as inside:
            _enter(inside.fileno())
            try:
                _set_up()
                yield
            finally:
                _enter(before.fileno())
    finally:
        _ip("netns", "delete", name)


def _set_up() -> None:
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "node0", "type", "bridge")
    for address in (NODE_IP, SECOND_NODE_IP):
        _ip("address", "add", f"{address}/24", "dev", "node0")
    _ip("link", "set", "node0", "up")
    # kube-proxy rewrites service addresses, but only for packets that have a route.
    _ip("route", "add", SERVICE_RANGE, "dev", "node0")
    subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace; root is needed")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
