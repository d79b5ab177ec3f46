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
# Prefixes under which an IPv6 address carries an IPv4 one: NAT64 and 6to4.
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Reach:
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
    """Whether an address belongs to the internet, whichever way it is written."""
    return all(
        inner.is_global and not inner.is_multicast and not inner.is_reserved
        for inner in _carried(ipaddress.ip_address(address.partition("%")[0]))
    )


def _carried(address: _Address) -> list[_Address]:
    """The address itself, or the ones that traffic to it ends at."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    if address.teredo is not None:
        return [address, *address.teredo]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address]
