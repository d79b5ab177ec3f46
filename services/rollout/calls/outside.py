"""Requests to services that a specification names, at addresses that an installation allows."""

from typing import Any

import httpx

from services.common import tracing
from services.rollout.failures import CallError
from services.rollout.rewards.reach import Reach

_MAX_ANSWER_BYTES = 1 << 20


class OutsideService:
    """Posts JSON to one URL.

    Redirects are not followed, and neither proxies nor credentials come from the environment.

    Args:
        url: ``http://`` or ``https://``.
        reach: Where it may be.
        transport: Replaces the network in tests.
    """

    def __init__(
        self, url: str, *, reach: Reach, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = httpx.URL(url)
        self._reach = reach
        self._http = httpx.AsyncClient(
            transport=transport,
            timeout=None,  # noqa: S113 -- the caller has a deadline
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        """Post to the address that was checked, as to the host of the URL.

        Raises:
            BusyError: If the host does not resolve now.
            CallError: If it may not be asked, or answers too much.
            httpx.TransportError: If it does not answer.
        """
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        address = await self._reach.resolve(self._url.host, port)
        request = self._http.build_request(
            "POST",
            self._url.copy_with(host=address),
            json=body,
            headers={"Host": self._url.netloc.decode(), **tracing.headers()},
            extensions={"sni_hostname": self._url.host},
        )
        response = await self._http.send(request, stream=True)
        try:
            content = b""
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _MAX_ANSWER_BYTES:
                    raise CallError(
                        "invalid_value", f"{self._url} answered more than {_MAX_ANSWER_BYTES} bytes"
                    )
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, content=content)
