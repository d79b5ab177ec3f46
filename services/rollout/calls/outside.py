"""Client for external services that a run's specification names.

The installation decides which addresses are allowed.
"""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from services.common.telemetry import tracing
from services.rollout.calls.reach import AddressPolicy
from services.rollout.failures import CallError

_MAX_ANSWER_BYTES = 1 << 20


class ExternalService:
    """Sends JSON to a URL and to paths below it.

    It follows no redirects, takes neither proxies nor credentials from the environment, and accepts
    no compressed responses. It reads responses of up to 1 MiB.

    Args:
        url: ``http://`` or ``https://``.
        reach: Addresses that it may have.
        token: Token to send as ``Authorization: Bearer``; empty sends none.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        reach: AddressPolicy,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
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
            transport=transport,
            timeout=None,  # noqa: S113 -- the caller has a deadline
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        """Closes the connections."""
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
        url = self._url
        if path:
            url = url.copy_with(path=url.path.rstrip("/") + path)
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        address = await self._reach.resolve(self._url.host, port)
        request = self._http.build_request(
            method,
            url.copy_with(host=address),
            content=None if body is None else json.dumps(body, default=str).encode(),
            headers={**self._headers, **tracing.headers()},
            extensions={"sni_hostname": self._url.host},
        )
        response = await self._http.send(request, stream=True)
        try:
            self._check_encoding(response)
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _MAX_ANSWER_BYTES:
                    raise CallError(
                        "invalid_value", f"{self._url} returned more than {_MAX_ANSWER_BYTES} bytes"
                    )
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, content=bytes(content))

    def _check_encoding(self, response: httpx.Response) -> None:
        # A few bytes may decompress to gigabytes, which no deadline would interrupt.
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise CallError(
                "invalid_value",
                f"{self._url} responded with Content-Encoding {encoding!r:.80}, but the request accepts "
                "identity only; send plain JSON",
            )
