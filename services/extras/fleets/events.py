"""Reading the responses of a server to requests for tokens."""

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx

from services.extras.external_engine.request_segments import TokenChunk
from services.extras.fleets.client import (
    OVERLOADED,
    FleetServer,
    ReadEvent,
    ServerAwayError,
    ServerFailedError,
    ServerOverloadedError,
    reason_of,
    retry_after_s,
)
from services.rollout.engines.base import EngineDiedError

_MAX_LINE_BYTES: Final = 16 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


async def event_chunks(
    server: FleetServer, response: httpx.Response, *, read: ReadEvent
) -> AsyncIterator[TokenChunk]:
    """Yields the tokens of an event stream."""
    async for event in _events(server, response):
        if error := event.get("error"):
            raise _error_in_response(server, error)
        if (chunk := read(event)) is not None:
            yield chunk


def _error_in_response(server: FleetServer, error: object) -> Exception:
    """Returns the error that an event means which ends a response."""
    message = f"{server.address} ended a response: {str(error)[:300]}"
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code in OVERLOADED:
        return ServerOverloadedError(message)
    return ServerFailedError(message)


async def check_status(server: FleetServer, response: httpx.Response) -> None:
    """Raises the error that a status other than 200 means."""
    status, text = response.status_code, bytearray()
    if status == 200:
        return
    async for chunk in response.aiter_bytes():
        text += chunk
        if len(text) > _MAX_ERROR_BYTES:
            break
    message = (
        f"{server.address} answered {status} to a request for tokens: {reason_of(bytes(text))}"
    )
    if status in (401, 403, 404, 408, 412, 425):
        raise ServerAwayError(message)
    if status in OVERLOADED:
        raise ServerOverloadedError(message, retry_after_s(response))
    if status >= 500:
        raise ServerFailedError(message)
    raise EngineDiedError(message)


async def read_lines(server: FleetServer, response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the lines of a response, and no rest without an end.

    Raises:
        ServerFailedError: If a line has more than ``_MAX_LINE_BYTES``.
    """
    line = bytearray()
    async for chunk in response.aiter_bytes():
        for piece in chunk.splitlines(keepends=True):
            line += piece
            if len(line) > _MAX_LINE_BYTES:
                raise ServerFailedError(
                    f"{server.address} sent an event of more than {_MAX_LINE_BYTES} bytes"
                )
            if line.endswith(b"\n"):
                yield bytes(line)
                line.clear()


async def _events(server: FleetServer, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the objects of an event stream until its end mark.

    Raises:
        ServerOverloadedError: If it has no end mark.
        ServerFailedError: If it is no such stream.
    """
    is_done = False
    async for line in read_lines(server, response):
        if is_done or not line.startswith(_DATA):
            continue  # reads to the end, so that the connection can be used again
        text = line.removeprefix(_DATA)
        if is_done := text.strip() == _DONE:
            continue
        try:
            event = json.loads(text)
        except ValueError as error:
            raise malformed(server, text) from error
        if not isinstance(event, dict):
            raise malformed(server, text)
        yield event
    if not is_done:
        raise ended_early(server)


def ended_early(server: FleetServer) -> ServerOverloadedError:
    return ServerOverloadedError(
        f"the connection to {server.address} ended in the middle of a response", is_reset=True
    )


def malformed(server: FleetServer, text: bytes) -> ServerFailedError:
    sample = text[:200].decode(errors="replace")
    return ServerFailedError(f"{server.address} sent a malformed event: {sample}")
