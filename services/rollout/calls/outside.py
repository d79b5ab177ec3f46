"""Client for external services that a run's specification names.

The installation decides which addresses are allowed.
"""

import asyncio
import ipaddress
import json
import random
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import httpx

from services.common.http.connections import ReusedConnections
from services.common.telemetry import tracing
from services.rollout.failures import BusyError, CallError


def json_text(value: Any) -> str:
    """Returns a value as JSON text; converts every value of a row that JSON cannot represent.

    NumPy and torch values become numbers and lists, tuples and sets become lists, keys of mappings and
    all other values become text.

    Raises:
        RecursionError: If the value contains itself.
    """
    try:
        return json.dumps(value, default=_plain)
    except TypeError:  # a key whose type JSON lacks
        return json.dumps(_with_text_keys(value), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    as_list = getattr(value, "tolist", None)  # of NumPy and torch, scalars included
    return as_list() if callable(as_list) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _with_text_keys(item)
            for key, item in value.items()
        }
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


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
        addresses = [host]
        if not _is_address(host):
            loop = asyncio.get_running_loop()
            try:
                entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                raise BusyError(f"the host {host!r} does not resolve: {error}") from error
            addresses = [str(entry[4][0]) for entry in entries]
        if host.lower() not in self.inner_hosts:
            for address in addresses:
                if not is_public(address):
                    raise CallError(
                        "exception",
                        f"the service {host!r} is at {address}, which is not public; add it to the "
                        "installation's reward_hosts",
                    )
        return addresses[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
    """Returns the addresses at which traffic to an address ends: the address itself, or embedded ones."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return [last]
    is_isatap = (int(address) >> 32) & 0xFFFFFFFF in _ISATAP
    tunnelled = [address.sixtofour, *(address.teredo or ()), last if is_isatap else None]
    return [address, *(inner_address for inner_address in tunnelled if inner_address is not None)]


_MAX_ANSWER_BYTES: Final = 1 << 20


def delays(first_s: float, max_s: float) -> Iterator[float]:
    """Yields seconds to wait before each retry, without end: exponential backoff with jitter.

    Args:
        first_s: Max of the first delay.
        max_s: Max of every delay.
    """
    longest_s = first_s
    while True:
        yield longest_s * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter
        longest_s = min(2 * longest_s, max_s)


class ExternalService:
    """Sends JSON to a URL and to paths below it.

    It follows no redirects, takes neither proxies nor credentials from the environment, and accepts
    no compressed responses.

    Args:
        url: ``http://`` or ``https://``.
        reach: Resolves the URL's host to an address that is allowed.
        token: Token to send as ``Authorization: Bearer``; empty sends none.
        transport: Connections to the service; None for connections over the network.
        max_answer_bytes: Max bytes of a response.
    """

    def __init__(
        self,
        url: str,
        *,
        reach: AddressPolicy,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
    ) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._url = httpx.URL(url)
        self._headers = {
            "Host": self._url.netloc.decode(),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._reach = reach
        self._http = httpx.AsyncClient(
            transport=transport or ReusedConnections(),
            timeout=None,  # noqa: S113 -- the caller has a deadline
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, body: Mapping[str, Any]) -> httpx.Response:
        """Posts to the URL; see :meth:`send`."""
        return await self.send("POST", "", body)

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Sends a request to the checked address, with the URL's host as host name.

        Args:
            method: For example ``POST``.
            path: Path to append to that of the URL.
            body: JSON-like.

        Raises:
            BusyError: If the host does not resolve now.
            CallError: If the address is not allowed, or the response is too large or compressed.
            httpx.TransportError: If the service does not respond.
        """
        content = bytearray()
        body_bytes = None if body is None else json_text(body).encode()
        async with self.stream(method, path, body_bytes) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > self._max_answer_bytes:
                    raise CallError(
                        "invalid_value",
                        f"{self._url} returned more than {self._max_answer_bytes} bytes",
                    )
        return httpx.Response(response.status_code, content=bytes(content))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[httpx.Response]:
        """Sends a request like :meth:`send`; yields the response, whose body the caller reads and bounds.

        Args:
            content: Body, whole or in parts; JSON unless ``headers`` say otherwise.
            headers: Further headers.

        Raises:
            BusyError: If the host does not resolve now.
            CallError: If the address is not allowed, or the response is compressed.
            httpx.TransportError: If the service does not respond.
        """
        url = self._url
        if path:
            url = url.copy_with(path=url.path.rstrip("/") + path)
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        address = await self._reach.resolve(self._url.host, port)
        request = self._http.build_request(
            method,
            url.copy_with(host=address),
            content=content,
            headers={**self._headers, **tracing.headers(), **headers},
            extensions={"sni_hostname": self._url.host},
        )
        response = await self._http.send(request, stream=True)
        try:
            self._check_encoding(response)
            yield response
        finally:
            await response.aclose()

    def _check_encoding(self, response: httpx.Response) -> None:
        # A few bytes may decompress to gigabytes, which no deadline would interrupt.
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise CallError(
                "invalid_value",
                f"{self._url} responded with Content-Encoding {encoding!r:.80}, but the request accepts "
                "identity only; send plain JSON",
            )
