"""Address of a node at which processes on other nodes reach it."""

import socket
from ipaddress import IPv4Network, IPv6Network, ip_address

import psutil

_DISCARD_PORT = 9


class AddressError(RuntimeError):
    """Reports that a node has no usable address; the message has the cause and a fix."""


def address_of(*, network: IPv4Network | IPv6Network | None, configured: str, peer: str) -> str:
    """Returns an address of this host.

    Args:
        network: Network of the address; None if any may be used.
        configured: ``NodeAddr`` of this node, a name or an address; empty if unknown.
        peer: Address of another node, or of this one.

    Raises:
        AddressError: If this host has no address in the network.
    """
    if network is not None:
        return _in_network(network)
    for address in _resolved(configured):
        # On Debian, a host resolves its own name to 127.0.1.1, where no other host reaches it.
        if _is_own(address) and (address == configured or not ip_address(address).is_loopback):
            return address
    return _on_route(peer)


def in_url(address: str) -> str:
    """Returns an address as it precedes ``:port``; IPv6 addresses have brackets."""
    return f"[{address}]" if ":" in address else address


def _in_network(network: IPv4Network | IPv6Network) -> str:
    host_addresses = [
        candidate.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for candidate in addresses
        if candidate.family in (socket.AF_INET, socket.AF_INET6)
    ]
    for address in host_addresses:
        if ip_address(address) in network:
            return address
    raise AddressError(
        f"SLIPSTREAM_SLURM_NETWORK is {network}, but {socket.gethostname()} has only "
        f"{', '.join(host_addresses)}; set it to a network of all nodes"
    )


def _resolved(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
    except OSError:
        return []
    # IPv4 first: some libraries that workers use know no other.
    return sorted((str(entry[4][0]) for entry in entries), key=lambda address: ":" in address)


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _on_route(peer: str) -> str:
    """Returns the local address of the route to another host; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _DISCARD_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"{socket.gethostname()} has no route to the first node ({peer}: {error.strerror}); set "
            "SLIPSTREAM_SLURM_NETWORK to the network of all nodes, such as 10.4.0.0/16"
        ) from error
