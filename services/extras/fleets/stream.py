"""Tokens of one segment from a server: an event stream, read by a task that a cut can end at once."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import httpx

from services.extras.external_engine.request_segments import Segment, TokenChunk
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
from services.extras.fleets.protocol import TOKEN_LINES
from services.rollout.engines.base import EngineDiedError
from services.rollout.failures import BusyError, CallError

_MAX_LINE_BYTES: Final = 16 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_RETRY_S: Final = 1.0
"""Seconds between a server's failure in a request and the request's next segment."""
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_ABORTED: Final = TokenChunk(token_ids=(), logprobs=(), finish_reason="abort")
"""The segment ends here, and the response continues in another one, on any server."""

Lease = Callable[[], AbstractAsyncContextManager[FleetServer]]
"""Waits for a server with the version of the segment, and holds a place on it."""


class FleetStream:
    """Stream of a segment; it ends with ``abort`` if its server is lost or gets other weights.

    Args:
        lease: Returns a context that holds a place on a server.
        on_lost: Receives the server and the reason if the server ended the stream before its time.
        on_failed: Receives the server and the reason if the server failed in this request; an error that it
            raises ends the stream.
        on_overloaded: Receives the server and the error if the server or a proxy refused the request or
            reset its connection; returns the seconds to wait. An error that it raises ends the stream.
        on_tokens: Called when tokens arrive.
    """

    def __init__(
        self,
        segment: Segment,
        lease: Lease,
        on_lost: Callable[[FleetServer, str], None],
        on_failed: Callable[[FleetServer, str], None],
        on_overloaded: Callable[[FleetServer, ServerOverloadedError], float],
        on_tokens: Callable[[FleetServer], object],
    ) -> None:
        self.segment_id = segment.segment_id
        self._segment = segment
        self.server: FleetServer | None = None
        """The server that samples; None while the segment waits for one."""
        self.crosses_updates = False
        """True once the server has begun a response that goes on when its version is replaced."""
        self._lease = lease
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._on_overloaded = on_overloaded
        self._on_tokens = on_tokens
        self._chunks: deque[TokenChunk] = deque()
        self._failure: BaseException | None = None
        self._arrived = asyncio.Event()
        self._is_ending = False
        self._reading = asyncio.ensure_future(self._read())

    async def next(self) -> TokenChunk:
        """Returns the tokens since the last call. Raises EngineDiedError."""
        while not self._chunks and self._failure is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._chunks:
            return self._chunks.popleft()
        assert self._failure is not None
        raise self._failure

    def cut(self) -> None:
        """Ends the segment after the tokens that have arrived."""
        if not (self._is_ending or self._reading.done()):
            self._cancel()
            self._put(_ABORTED)

    async def close(self) -> None:
        self._cancel()
        await asyncio.wait([self._reading])

    def _cancel(self) -> None:
        """Cancels the reader once: a second time would interrupt it while it closes its connection."""
        if not self._is_ending:
            self._is_ending = True
            self._reading.cancel()

    def _put(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    async def _read(self) -> None:
        try:
            async with self._lease() as server:
                self.server = server
                last, wait_s = await self._read_or_abort(server)
            await asyncio.sleep(wait_s)
            # The connection is closed or idle by now, so that the end of the segment, after which this task
            # is cancelled, does not interrupt that.
            self._is_ending = True
            self._put(last)
        except Exception as error:  # noqa: BLE001 -- it is raised where the tokens are awaited
            self._failure = error
            self._arrived.set()

    async def _read_or_abort(self, server: FleetServer) -> tuple[TokenChunk, float]:
        """Reads a response; returns its last tokens, and the seconds to wait before the next segment.

        Raises:
            EngineDiedError: If no further segment can help.
        """
        try:
            return await self._read_from(server), 0.0
        except ServerAwayError as error:
            self._is_ending = True  # the loss of the server cuts this segment too
            self._on_lost(server, str(error))
            return _ABORTED, 0.0
        except ServerFailedError as error:
            self._on_failed(server, str(error))
            return _ABORTED, _RETRY_S
        except ServerOverloadedError as error:
            return _ABORTED, self._on_overloaded(server, error)
        except (BusyError, httpx.TransportError) as error:
            reset = ServerOverloadedError(
                f"the connection to {server.address} ended: {str(error) or repr(error)}",
                is_reset=True,
            )
            return _ABORTED, self._on_overloaded(server, reset)
        except CallError as error:
            raise EngineDiedError(f"{server.address}: {error}") from error

    async def _read_from(self, server: FleetServer) -> TokenChunk:
        """Passes on the tokens of a response but the last; returns these with their finish reason."""
        async with server.stream(server.body(self._segment)) as response:
            if response.status_code != 200:
                await _refuse(server, response)
            self.crosses_updates = response.headers.get("content-type") == TOKEN_LINES
            read = server.read_events(self._segment)
            chunks = _token_lines if self.crosses_updates else partial(_event_chunks, read=read)
            last: TokenChunk | None = None
            async for chunk in chunks(server, response):
                if last is not None:
                    continue  # reads to the end, so that the connection can be used again
                if chunk.token_ids:
                    self._on_tokens(server)
                if chunk.finish_reason is None:
                    self._put(chunk)
                else:
                    last = chunk
            if last is None:
                raise ServerFailedError(f"{server.address} ended a response without a reason")
        return last


async def _event_chunks(
    server: FleetServer, response: httpx.Response, *, read: ReadEvent
) -> AsyncIterator[TokenChunk]:
    """Yields the tokens of an event stream."""
    async for event in _events(server, response):
        if error := event.get("error"):
            raise _error_in_response(server, error)
        if (chunk := read(event)) is not None:
            yield chunk


async def _token_lines(server: FleetServer, response: httpx.Response) -> AsyncIterator[TokenChunk]:
    """Yields the tokens of a response of ``protocol.TOKEN_LINES``.

    Raises:
        ServerOverloadedError: If the response has no last line.
        ServerFailedError: If a line is malformed, or the engine failed in the request.
    """
    is_ended = False
    async for line in _lines(server, response):
        try:
            chunk = _read_token_line(line)
        except (TypeError, ValueError) as error:
            raise _malformed(server, line) from error
        if chunk.finish_reason == "error":
            raise ServerFailedError(f"the engine of {server.address} failed in a request")
        is_ended = chunk.finish_reason is not None
        yield chunk
    if not is_ended:
        raise _ended_early(server)


def _read_token_line(line: bytes) -> TokenChunk:
    """Reads a line of ``protocol.TOKEN_LINES``. Raises TypeError or ValueError."""
    token_ids, logprobs, runs, cached_tokens, reason = json.loads(line)
    version_runs = [(int(version), int(count)) for version, count in runs]
    if not len(token_ids) == len(logprobs) == sum(count for _, count in version_runs):
        raise ValueError("tokens, logprobs and versions have different lengths")
    return TokenChunk(
        token_ids=token_ids,
        logprobs=logprobs,
        version_runs=version_runs,
        cached_tokens=int(cached_tokens),
        finish_reason=reason,
    )


def _error_in_response(server: FleetServer, error: object) -> Exception:
    """Returns the error that an event means which ends a response."""
    message = f"{server.address} ended a response: {str(error)[:300]}"
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code in OVERLOADED:
        return ServerOverloadedError(message)
    return ServerFailedError(message)


async def _refuse(server: FleetServer, response: httpx.Response) -> None:
    """Raises the error that a status other than 200 means."""
    status, text = response.status_code, bytearray()
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


async def _lines(server: FleetServer, response: httpx.Response) -> AsyncIterator[bytes]:
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
    async for line in _lines(server, response):
        if is_done or not line.startswith(_DATA):
            continue  # reads to the end, so that the connection can be used again
        text = line.removeprefix(_DATA)
        if is_done := text.strip() == _DONE:
            continue
        try:
            event = json.loads(text)
        except ValueError as error:
            raise _malformed(server, text) from error
        if not isinstance(event, dict):
            raise _malformed(server, text)
        yield event
    if not is_done:
        raise _ended_early(server)


def _ended_early(server: FleetServer) -> ServerOverloadedError:
    return ServerOverloadedError(
        f"the connection to {server.address} ended in the middle of a response", is_reset=True
    )


def _malformed(server: FleetServer, text: bytes) -> ServerFailedError:
    sample = text[:200].decode(errors="replace")
    return ServerFailedError(f"{server.address} sent a malformed event: {sample}")
