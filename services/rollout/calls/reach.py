"""Restricts the addresses of external services to public ones and those that the installation allows.

A run's specification names the service. Without this check, users who may submit runs could make workers
connect to metadata services, databases and other internal services.
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
# All addresses that IANA has assigned for unicast on the internet; others are local, reserved or
# tunnels.
_GLOBAL_IPV6: Final = ipaddress.IPv6Network("2000::/3")
# Addresses that :mod:`ipaddress` counts as global, because its registry is as old as the Python
# version.
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
# Interface identifiers of ISATAP (RFC 5214), whose last 32 bits are an IPv4 address.
_ISATAP: Final = (0x00005EFE, 0x02005EFE)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Resolves hosts to addresses that this process may connect to.

    Args:
        inner_hosts: Host names and addresses that may be private.
    """

    inner_hosts: Collection[str] = ()

    async def resolve(self, host: str, port: int) -> str:
        """Returns the address to connect to.

        Connect to this address and not to the name, which may resolve to another one by then.

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
                        f"the reward service {host!r} is at {address}, which is not public; add it to the "
                        "installation's reward_hosts",
                    )
        return addresses[0]


def is_public(address: str) -> bool:
    """Returns True if an address belongs to the public internet, in any notation.

    Metadata services of clouds do not count as public, although some have global addresses.
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
    """Returns the address itself, or the addresses that its traffic ends at."""
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
