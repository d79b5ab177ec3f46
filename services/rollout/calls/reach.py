"""Where a reward service may be: anywhere public, and inside only where the installation says so.

A run's specification names the service, so without this whoever may submit runs could make workers talk to
metadata services, databases and other things that are open to the inside.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from services.rollout.failures import BusyError, CallError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# All that IANA has given out for unicast on the internet; what is beside it is local, reserved or a tunnel.
_GLOBAL_IPV6: Final = ipaddress.IPv6Network("2000::/3")
# What the registry of :mod:`ipaddress`, which is as old as Python is, counts as global.
_NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # IETF protocol assignments; 192.0.0.192 has Oracle's metadata
            "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
            "168.63.129.16/32",  # Azure's metadata and agents
            "192.80.8.124/32",  # Equinix Metal's metadata
            "3fff::/20",  # documentation (RFC 9637)
        ),
    )
)
# The interface identifiers of ISATAP (RFC 5214), whose last 32 bits are an IPv4 address.
_ISATAP: Final = (0x00005EFE, 0x02005EFE)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Resolves hosts to addresses that may be connected to.

    Args:
        inner_hosts: Names and addresses that may be private.
    """

    inner_hosts: Collection[str] = ()

    async def resolve(self, host: str, port: int) -> str:
        """The address to connect to. Connect to it and not to the name, which may mean another one by then.

        Raises:
            BusyError: If the name does not resolve now.
            CallError: If one of its addresses is not public.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise BusyError from error
        addresses = [str(entry[4][0]) for entry in found]
        if host.lower() not in self.inner_hosts:
            for address in addresses:
                if not is_public(address):
                    raise CallError(
                        "exception",
                        f"the reward service {host!r} is at {address}, which is not public; let the "
                        "installation's reward_hosts name it",
                    )
        return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet, whichever way it is written.

    Metadata services of clouds do not, although some of them have addresses that are global by themselves.
    """
    return all(map(_is_public, _carried(ipaddress.ip_address(address.partition("%")[0]))))


def _is_public(address: _Address) -> bool:
    is_assigned = address.version == 4 or address in _GLOBAL_IPV6
    is_special = address.is_multicast or address.is_reserved
    return (
        address.is_global
        and is_assigned
        and not is_special
        and not any(address in network for network in _NOT_PUBLIC)
    )


def _carried(address: _Address) -> list[_Address]:
    """The address itself, or the ones that traffic to it ends at."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return [last]
    is_isatap = (int(address) >> 32) & 0xFFFFFFFF in _ISATAP
    tunnelled = [address.sixtofour, *(address.teredo or ()), last if is_isatap else None]
    return [address, *(each for each in tunnelled if each is not None)]
