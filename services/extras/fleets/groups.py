"""Segments that begin at about the same time share a request to a server, whose response has all tokens.

At a new version, hundreds of prompts begin at once. A request for each would occupy the rollout for
milliseconds, and each batch of its tokens for a fraction of one.
"""

import asyncio
import base64
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.fleets.client import (
    FleetServer,
    ServerAwayError,
    ServerFailedError,
    ServerRefusedError,
)
from services.extras.fleets.events import check_status, ended_early, malformed, read_lines
from services.extras.fleets.protocol import TOKEN_LINES
from services.wire.data.model_inputs import ModelInputs

_GATHER_S: Final = 0.003
"""Time for which the first segment of a group waits for others."""
_MAX_SEGMENTS: Final = 64
_MAX_TOKENS: Final = 1 << 20
"""Max tokens of the contexts of a group, which bounds the bytes of its request."""
_MAX_IMAGE_BYTES: Final = 1 << 26
"""Bytes of images after which no further segment joins a group."""


Cut = Callable[[str, list[int]], Awaitable[None]]
"""Ends segments in the server, by the name of their group and their numbers."""


class TokenGroups:
    """Gathers the segments of one session with a server.

    Args:
        dtype: Name of the engine's dtype, which pixels of images have.
    """

    def __init__(self, server: FleetServer, cut: Cut, *, dtype: str) -> None:
        self._server = server
        self._cut = cut
        self._dtype = dtype
        self._newest: _TokenGroup | None = None

    async def read(
        self,
        segment: Segment,
        *,
        on_begin: Callable[[], None],
        on_chunk: Callable[[TokenChunk], None],
    ) -> TokenChunk:
        """Samples a segment; returns its last tokens. A caller that is cancelled ends the segment.

        Args:
            on_begin: Called once the server has begun the response, which goes on under the next version.
            on_chunk: Receives all tokens but the last ones.

        Raises:
            ServerAwayError: If the server no longer serves the version.
            ServerFailedError: If it failed in this segment, or sent a malformed response.
            ServerOverloadedError: If it refused the request, or the response ended early.
            httpx.TransportError: If the server does not respond.
        """
        group = self._newest
        if group is None or not group.takes(segment):
            group = self._newest = _TokenGroup(self._server, self._cut, self._dtype)
        return await group.read(segment, on_begin, on_chunk)


@dataclass(frozen=True, slots=True)
class _Member:
    on_begin: Callable[[], None]
    on_chunk: Callable[[TokenChunk], None]
    ended: asyncio.Future[TokenChunk]


class _TokenGroup:
    """One request and its response."""

    def __init__(self, server: FleetServer, cut: Cut, dtype: str) -> None:
        self._server = server
        self._cut = cut
        self._dtype = dtype
        self._name = uuid.uuid4().hex
        self._members: dict[int, _Member] = {}
        """Segments without a last token, by number."""
        self._bodies: dict[int, Mapping[str, Any]] = {}
        self._images: dict[str, ModelInputs] = {}
        """Images of the segments' prompts by digest."""
        self._num_segments = self._num_tokens = self._image_bytes = 0
        self._is_closed = False
        """True once no further segment can join."""
        self._unwanted: list[int] = []
        """Numbers of segments that the server does not know yet to be cut."""
        self._running = asyncio.ensure_future(self._run())
        self._cutting: asyncio.Future[None] | None = None
        self._has_begun = asyncio.Event()
        """Set once the server knows the group, or will never know it."""

    def takes(self, segment: Segment) -> bool:
        num_tokens = self._num_tokens + len(segment.context_ids)
        has_space = not self._bodies or num_tokens <= _MAX_TOKENS
        has_space &= self._image_bytes < _MAX_IMAGE_BYTES
        return not self._is_closed and self._num_segments < _MAX_SEGMENTS and has_space

    async def read(
        self,
        segment: Segment,
        on_begin: Callable[[], None],
        on_chunk: Callable[[TokenChunk], None],
    ) -> TokenChunk:
        """Adds a segment and waits for its end; see :meth:`TokenGroups.read`."""
        number, self._num_segments = self._num_segments, self._num_segments + 1
        self._num_tokens += len(segment.context_ids)
        self._bodies[number] = self._server.body(segment)
        self._add_images(segment.request.model_inputs)
        ended: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
        self._members[number] = _Member(on_begin, on_chunk, ended)
        try:
            return await ended
        finally:
            if self._members.pop(number, None) is not None:
                self._leave(number)

    def _add_images(self, images: ModelInputs | None) -> None:
        if images is not None and images.tensors and images.digest not in self._images:
            self._images[images.digest] = images
            self._image_bytes += sum(tensor.nbytes for tensor in images.tensors.values())

    def _leave(self, number: int) -> None:
        """Ends a segment whose reader has gone."""
        if not self._members:
            self._is_closed = True
            self._has_begun.set()
            self._running.cancel()  # closes the connection, which ends everything in the server
        elif self._bodies.pop(number, None) is None:
            self._unwanted.append(number)
            if self._cutting is None:
                self._cutting = asyncio.ensure_future(self._send_cuts())

    async def _send_cuts(self) -> None:
        await self._has_begun.wait()  # the server ignores cuts of a group that it does not know yet
        while self._unwanted and self._members:
            numbers, self._unwanted = self._unwanted, []
            # A server that is lost has ended them.
            with suppress(ServerAwayError, ServerRefusedError):
                await self._cut(self._name, numbers)
        self._cutting = None

    async def _run(self) -> None:
        try:
            await asyncio.sleep(_GATHER_S)
            self._is_closed = True
            bodies, self._bodies = self._bodies, {}
            body: dict[str, Any] = {"group": self._name, "requests": [*bodies.items()]}
            if self._images:
                body["model_inputs"] = await asyncio.to_thread(_encoded, self._images, self._dtype)
            await self._exchange(body)
            self._fail(ended_early(self._server))
        except Exception as error:  # noqa: BLE001 -- it is raised where the segments are awaited
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the segments that have not ended."""
        self._is_closed = True
        self._has_begun.set()
        members, self._members = [*self._members.values()], {}
        for member in members:
            if not member.ended.done():
                member.ended.set_exception(error)

    async def _exchange(self, body: Mapping[str, Any]) -> None:
        async with self._server.stream(body) as response:
            await check_status(self._server, response)
            if response.headers.get("content-type") != TOKEN_LINES:
                raise ServerFailedError(f"{self._server.address} answered in another form")
            self._has_begun.set()
            for member in [*self._members.values()]:
                member.on_begin()
            async for line in read_lines(self._server, response):
                try:
                    number, chunk = read_token_line(line)
                except (TypeError, ValueError) as error:
                    raise malformed(self._server, line) from error
                self._deliver(number, chunk)

    def _deliver(self, number: int, chunk: TokenChunk) -> None:
        member = self._members.get(number)
        if member is None or member.ended.done():
            return  # it was cut
        if chunk.finish_reason is None:
            member.on_chunk(chunk)
            return
        del self._members[number]
        if chunk.finish_reason == "error":
            failure = f"the engine of {self._server.address} failed in a request"
            member.ended.set_exception(ServerFailedError(failure))
        else:
            member.ended.set_result(chunk)


def _encoded(images: Mapping[str, ModelInputs], dtype: str) -> dict[str, str]:
    """Encodes images by their digests, with pixels of the engine's dtype."""
    texts = {}
    for digest, inputs in images.items():
        pixels = inputs.tensors["pixel_values"].to(getattr(torch, dtype))
        encoded = ModelInputs.from_values({**inputs.tensors, "pixel_values": pixels}).encoded
        texts[digest] = base64.b64encode(encoded.numpy().data).decode()
    return texts


def read_token_line(line: bytes) -> tuple[int, TokenChunk]:
    """Reads a line of ``protocol.TOKEN_LINES``; returns the number of its segment, and the tokens.

    Raises:
        TypeError: If it is malformed.
        ValueError: Likewise.
    """
    number, token_ids, logprobs, runs, cached_tokens, reason = json.loads(line)
    version_runs = [(int(version), int(count)) for version, count in runs]
    if not len(token_ids) == len(logprobs) == sum(count for _, count in version_runs):
        raise ValueError("tokens, logprobs and versions have different lengths")
    chunk = TokenChunk(
        token_ids=token_ids,
        logprobs=logprobs,
        version_runs=version_runs,
        cached_tokens=int(cached_tokens),
        finish_reason=reason,
    )
    return int(number), chunk
