"""Tokens of one segment from a server: an event stream, read by a task that a cut can end at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import httpx

from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.fleets.client import (
    FleetServer,
    ServerAwayError,
    ServerFailedError,
    ServerOverloadedError,
)
from services.extras.fleets.events import check_status, event_chunks
from services.rollout.engines.base import EngineDiedError
from services.rollout.failures import BusyError, CallError

_RETRY_S: Final = 1.0
"""Seconds between a server's failure in a request and the request's next segment."""
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
        if (groups := server.token_groups) is not None:
            return self._counted(
                server,
                await groups.read(
                    self._segment,
                    on_begin=self._cross_updates,
                    on_chunk=lambda chunk: self._put(self._counted(server, chunk)),
                ),
            )
        async with server.stream(server.body(self._segment)) as response:
            await check_status(server, response)
            read = server.read_events(self._segment)
            last: TokenChunk | None = None
            async for chunk in event_chunks(server, response, read=read):
                if last is not None:
                    continue  # reads to the end, so that the connection can be used again
                self._counted(server, chunk)
                if chunk.finish_reason is None:
                    self._put(chunk)
                else:
                    last = chunk
            if last is None:
                raise ServerFailedError(f"{server.address} ended a response without a reason")
        return last

    def _counted(self, server: FleetServer, chunk: TokenChunk) -> TokenChunk:
        if chunk.token_ids:
            self._on_tokens(server)
        return chunk

    def _cross_updates(self) -> None:
        self.crosses_updates = True
