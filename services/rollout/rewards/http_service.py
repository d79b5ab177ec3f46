"""A reward service over HTTP."""

from collections.abc import Mapping
from typing import Any

import httpx

from services.rollout.calls.outside import OutsideService
from services.rollout.calls.reach import Reach
from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput


class HttpRewardService:
    """Posts ``{"prompt", "response", "answer", "row"}`` and expects ``{"score": number}``.

    The score may be terms by name. With ``sees_episode``, ``episode`` is posted too. Answers 429
    and 5xx and broken connections are worth another try.

    Args:
        url: ``http://`` or ``https://``.
        reach: Where it may be.
        token: Is shown to the service.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        reach: Reach,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._service = OutsideService(url, reach=reach, token=token, transport=transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def ask(self, given: RewardInput, episode: Mapping[str, Any] | None) -> Any:
        """Return what the service gives as score."""
        body = {
            "prompt": given.prompt,
            "response": given.response,
            "answer": given.answer,
            "row": dict(given.row),
        }
        if episode is not None:
            body["episode"] = dict(episode)
        try:
            response = await self._service.post(body)
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
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CallError(
                "invalid_value",
                f'{self._url} must answer {{"score": number or terms}}, but answered {response.text[:200]}',
            ) from error
