"""A reward service over HTTP."""

from typing import Any

import httpx

from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput
from services.rollout.rewards.reach import Reach
from services.rollout.rewards.remote import BusyError

_MAX_ANSWER_BYTES = 1 << 20


class HttpRewardService:
    """Posts ``{"prompt", "response", "answer", "row"}`` and expects ``{"score": number}``.

    Answers 429 and 5xx and broken connections are worth another try.

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
        self._http = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)  # noqa: S113

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, given: RewardInput) -> Any:
        """Return what the service gives as score."""
        body = {
            "prompt": given.prompt,
            "response": given.response,
            "answer": given.answer,
            "row": dict(given.row),
        }
        try:
            response = await self._post(body)
        except httpx.TransportError as error:
            raise BusyError from error
        if response.status_code == 429 or response.status_code >= 500:
            raise BusyError
        if not response.is_success:
            raise CallError(
                "exception", f"{self._url} answered {response.status_code}: {response.text[:200]}"
            )
        try:
            return response.json()["score"]
        except (ValueError, KeyError, TypeError) as error:
            raise CallError(
                "invalid_value",
                f'{self._url} must answer {{"score": number}}, but answered {response.text[:200]}',
            ) from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Post to the address that was checked, as to the host of the URL."""
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        address = await self._reach.resolve(self._url.host, port)
        request = self._http.build_request(
            "POST",
            self._url.copy_with(host=address),
            json=body,
            headers={"Host": self._url.netloc.decode()},
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
