"""HTTP requests to a controller, with retries while it restarts."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from slipstream_client.request import (
    MAX_ANSWER_BYTES,
    AnswerLines,
    ApiError,
    Request,
    error_of,
    json_object,
    no_controller,
    unreachable,
)

_TIMEOUT_S = 30.0
# The server sends a heartbeat every 10 s.
_SILENCE_S = 60.0
_RETRY_INTERVAL_S = 0.5
# Also bounds a server that sends a byte, or a heartbeat, now and then.
_ANSWER_S = 300.0
_DISCONNECTED = (httpx.ReadError, httpx.RemoteProtocolError)


class AsyncTransport:
    """Sends requests to one controller.

    Args:
        url: Such as ``http://127.0.0.1:8700``.
        token: API token; empty if the controller requires none.
        retry_s: Max seconds of retries while the controller does not answer.
        away_s: Max seconds that :meth:`watch` waits for the controller's answer.
        http: HTTP client that sends the requests. Default: a client that ignores proxy settings.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        retry_s: float = 0.0,
        away_s: float = _SILENCE_S,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self.url = url
        self._retry_s, self._away_s = retry_s, away_s
        self._http = http or httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
        self._http.base_url = httpx.URL(url)
        if token:
            self._http.headers["Authorization"] = f"Bearer {token}"

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def content(self, request: Request) -> bytes:
        """Sends a request and returns the body of the answer.

        Raises:
            ApiError: If the controller refuses the request or does not answer.
        """
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                async with self._http.stream(**request.options()) as response:
                    return await self._body(response)
            except httpx.TransportError as error:
                if not request.may_retry or time.monotonic() >= deadline:
                    raise unreachable(self.url, error) from error
            except httpx.DecodingError as error:
                raise no_controller(self.url, str(error)) from error
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _body(self, response: httpx.Response) -> bytes:
        """Returns the body of an answer. Raises ApiError if it is an error, too large, or takes too long."""
        content = bytearray()
        deadline = time.monotonic() + _ANSWER_S
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise no_controller(self.url, f"it sent more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise no_controller(self.url, f"its answer takes more than {_ANSWER_S:.0f} s")
        if not response.is_success:
            raise error_of(httpx.Response(response.status_code, content=bytes(content)))
        return bytes(content)

    async def page_link(self) -> str:
        """Returns a link to the run page that signs one browser in as this caller; it works once."""
        content = await self.content(Request(method="POST", path="/page/links", is_idempotent=True))
        return f"{self.url}{json_object(content, self.url).get('path', '')}"

    async def stream(
        self, request: Request, *, silence_s: float = _SILENCE_S, quiet_s: float = _ANSWER_S
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields a streamed response: ``(type, data)`` of each event, or ``("line", object)`` of each line.

        Raises:
            ApiError: If the controller refuses the request, or sends no whole event or line for ``quiet_s``.
            httpx.RequestError: If the connection fails, data is damaged, or none arrives for ``silence_s``.
        """
        timeout = httpx.Timeout(_TIMEOUT_S, read=silence_s)
        async with self._http.stream(**request.options(), timeout=timeout) as response:
            if not response.is_success:
                await self._body(response)
            is_events = response.headers.get("content-type", "").startswith("text/event-stream")
            kind, lines = "message" if is_events else "line", AnswerLines(self.url)
            received_at = time.monotonic()
            async for chunk in response.aiter_bytes():
                if time.monotonic() - received_at > quiet_s:
                    raise no_controller(self.url, f"it sent only heartbeats for {quiet_s:.0f} s")
                for line in lines.of(chunk):
                    if line.startswith("event:") and is_events:
                        kind = line.removeprefix("event:").strip()
                    elif line and (not is_events or line.startswith("data:")):
                        data = line.removeprefix("data:") if is_events else line
                        yield kind, json_object(data, self.url)
                        received_at = time.monotonic()
            for line in filter(None, lines.of(b"\n")) if not is_events else ():
                yield kind, json_object(line, self.url)

    async def watch(
        self, run_id: str, *, after_seq: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields the events of a run as they occur: ``(type, event)``; the last one is ``("end", run)``.

        It reconnects if the controller restarts; no event is missed or repeated.

        Args:
            run_id: The run.
            after_seq: Number of the last event to skip.
            timeout_s: Max seconds until the run ends; None for no limit.

        Raises:
            ApiError: If the controller refuses the request or does not answer for ``away_s``.
            TimeoutError: If the run takes longer than ``timeout_s`` to end.
        """
        begin = last_heartbeat = time.monotonic()
        while True:
            left_s = _SILENCE_S if timeout_s is None else begin + timeout_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{run_id} has not ended within {timeout_s:.0f} s")
            request = Request(
                method="GET",
                path="/v1/runs/{run_id}/events/stream",
                names={"run_id": run_id},
                headers={"last-event-id": str(after_seq)},
            )
            requested_at = time.monotonic()
            try:
                silence_s = min(left_s, _SILENCE_S)
                async for kind, data in self.stream(request, silence_s=silence_s, quiet_s=math.inf):
                    yield kind, data
                    if kind == "end":
                        return
                    after_seq, last_heartbeat = data.get("seq", after_seq), time.monotonic()
                    if timeout_s is not None and last_heartbeat > begin + timeout_s:
                        break
                last_heartbeat = time.monotonic()
            except httpx.TransportError as error:
                now = time.monotonic()
                # A stream may have no events for long, but the controller was reachable until it failed.
                if isinstance(error, _DISCONNECTED) and now - requested_at > _RETRY_INTERVAL_S:
                    last_heartbeat = now
                elif now - last_heartbeat > self._away_s:
                    problem = f"lost the connection to the controller at {self.url}: {error!r}"
                    raise ApiError(problem) from error
            await asyncio.sleep(_RETRY_INTERVAL_S)
