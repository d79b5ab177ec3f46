"""Nodes of a network on this machine: namespaces on one switch, with links that can be slowed and cut.

Switch and links are in namespaces, too, so that the host's network does not change. A cut link
loses packets silently, as a dead cable beyond a router does: no carrier is lost, no address becomes
unreachable, no connection is reset.
"""

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES = Path("/run/netns")
_PREFIX = "slnode-"
_SWITCH = f"{_PREFIX}switch"
_SUBNET = "10.213.0"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Node:
    """A host of the network."""

    name: str
    number: int

    @property
    def ip(self) -> str:
        """IPv4 address of the node."""
        return f"{_SUBNET}.{self.number}"

    @property
    def namespace(self) -> Path:
        """File of the node's network namespace."""
        return _NAMESPACES / f"{_PREFIX}{self.name}"

    @property
    def _mac(self) -> str:
        return f"02:00:0a:d5:00:{self.number:02x}"

    @property
    def _port(self) -> str:
        return f"port{self.number}"

    def slow(self, rate: str) -> None:
        """Limits the link in both directions, for example to ``4mbit``; a full queue drops packets."""
        shape = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
        _run("tc", "-n", _SWITCH, "qdisc", "replace", "dev", self._port, *shape)
        _run("tc", "-n", self.namespace.name, "qdisc", "replace", "dev", "eth0", *shape)

    def cut(self) -> None:
        """Drops all packets of the link, in both directions."""
        _run("ip", "-n", _SWITCH, "link", "set", self._port, "nomaster")

    def isolate(self, is_isolated: bool = True) -> None:
        """Drops all packets between this node and other isolated nodes."""
        state = "on" if is_isolated else "off"
        _run("bridge", "-n", _SWITCH, "link", "set", "dev", self._port, "isolated", state)

    def repair(self) -> None:
        """Undoes :meth:`slow`, :meth:`cut` and :meth:`isolate`."""
        _run("ip", "-n", _SWITCH, "link", "set", self._port, "master", "switch")
        self.isolate(False)
        for namespace, device in ((_SWITCH, self._port), (self.namespace.name, "eth0")):
            command = ("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
            # The command fails if the link has no limit.
            subprocess.run(command, check=False, capture_output=True)

    def connect(self, others: Sequence["Node"]) -> None:
        """Connects the node to the switch."""
        _add(self.namespace.name)
        ours = ("ip", "-n", self.namespace.name)
        _run(
            *("ip", "-n", _SWITCH, "link", "add", self._port, "type", "veth"),
            *("peer", "name", "eth0", "address", self._mac, "netns", self.namespace.name),
        )
        _run("ip", "-n", _SWITCH, "link", "set", self._port, "master", "switch", "up")
        _run(*ours, "link", "set", "lo", "up")
        _run(*ours, "link", "set", "eth0", "up")
        _run(*ours, "address", "add", f"{self.ip}/24", "dev", "eth0")
        for other in others:  # without these entries, address resolution would report a cut link
            if other != self:
                _run(*ours, "neighbour", "add", other.ip, "lladdr", other._mac, "dev", "eth0")


@contextmanager
def network(*names: str) -> Iterator[dict[str, Node]]:
    """Yields connected nodes by name; in the block, this thread and its children are on the first node."""
    nodes = [Node(name, number) for number, name in enumerate(names, 1)]
    _delete_all()
    try:
        _add(_SWITCH)
        _run("ip", "-n", _SWITCH, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", _SWITCH, "link", "set", "switch", "up")
        for node in nodes:
            node.connect(nodes)
        with _inside(nodes[0].namespace):
            yield {node.name: node for node in nodes}
    finally:
        _delete_all()


@contextmanager
def _inside(namespace: Path) -> Iterator[None]:
    with Path("/proc/thread-self/ns/net").open("rb") as before, namespace.open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace; root is needed")


def _add(namespace: str) -> None:
    _run("ip", "netns", "add", namespace)


def _delete_all() -> None:
    """Deletes all nodes' namespaces and their links, including those of a killed session."""
    for path in _NAMESPACES.glob(f"{_PREFIX}*"):
        _run("ip", "netns", "delete", path.name)


def _run(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
