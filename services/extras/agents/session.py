"""One episode of an agent: its record and its running requests, for every protocol."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from services.common.task_group import TaskGroup
from services.extras.agents.images import EpisodeImages, ImageMemory
from services.extras.agents.record import EpisodeRecord, History, Listener, Replies
from services.extras.agents.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    invalid,
    too_long,
)
from services.extras.agents.streaming import Formatter, ReplyStream
from services.rollout.workflows.base import Episode

MODEL_NAME = "policy"
"""Name of the only model that the endpoint serves."""
# A request may be this large: several times what its conversation can have as tokens. A larger one would
# stop all episodes of the process while it is read, only to be refused.
_MIN_REQUEST_BYTES = 1 << 20
_BYTES_PER_TOKEN = 64
# Each object outside a text takes 3 µs while no other episode goes on, every other value up to 1 µs.
_MAX_OBJECTS = 16_384
_MIN_VALUES = 32_768
_VALUES_IN_TEXTS = 4
"""The arguments of calls are JSON in a text; a text of other kinds has fewer brackets and commas."""
_Answer = asyncio.Task[Replies | ApiError]
_reply_numbers = itertools.count()


def new_id(prefix: str) -> str:
    """Returns an id for a reply of this process."""
    return f"{prefix}{next(_reply_numbers)}"


class Session:
    """One episode and its running requests."""

    def __init__(
        self,
        episode: Episode,
        tasks: TaskGroup,
        temperature: float,
        *,
        tool_format: str,
        history: History,
        image_memory: ImageMemory,
    ) -> None:
        self.episode = episode
        self._images = EpisodeImages(episode, image_memory)
        self.record = EpisodeRecord(episode, tool_format, history, self._images)
        self._tasks = tasks
        self._temperature = temperature
        self._running: set[_Answer] = set()
        self.notes: dict[str, Any] = {}
        """Values that protocols keep for the episode, by a key of theirs."""

    def begin(
        self, request: ChatRequest | CompletionRequest, listener: Listener | None = None
    ) -> _Answer:
        """Starts to sample in a task of the episode, which outlives the connection but not the episode.

        Raises:
            ApiError: If the request cannot be served, or the episode is ending.
        """
        self._check(request)
        replies = self._replies(request, listener)
        try:
            task = self._tasks.create_task(replies)
        except RuntimeError as error:  # the group accepts no task after one of its tasks has failed
            replies.close()
            raise _ended() from error
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def end(self, task: _Answer) -> Replies:
        """Waits for the answer.

        Raises:
            ApiError: If the request failed or the episode ended.
        """
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None:
            raise _ended()
        result = task.result()
        if isinstance(result, ApiError):
            raise result
        return result

    def close(self) -> None:
        """Cancels all running requests."""
        for task in self._running:
            task.cancel()
        self._images.close()

    async def body(self, request: Request) -> bytes:
        """Returns the body of a request. Raises ApiError if the model's context cannot hold it."""
        episode = self.episode
        limit = _MIN_REQUEST_BYTES + _BYTES_PER_TOKEN * episode.limits.max_tokens
        if episode.images is not None:
            limit += episode.images.max_request_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                episode.is_full = True
                raise too_long(
                    f"the request has more than {limit:,} bytes, so it has more tokens than the model's "
                    f"context ({episode.limits.max_tokens}); send a shorter conversation"
                )
        if _has_more_values(body, _MIN_VALUES + episode.limits.max_tokens):
            episode.is_full = True
            raise too_long(
                f"the request has more than {_MAX_OBJECTS:,} JSON objects, or more values than the model's "
                f"context has tokens ({episode.limits.max_tokens}); send fewer messages, parts or tools"
            )
        return bytes(body)

    async def answer(
        self,
        request: ChatRequest | CompletionRequest,
        formatter: Formatter,
        *,
        on_answer: Callable[[Replies], None] = lambda replies: None,
    ) -> Response:
        """Samples the replies to a request and returns them as one body or as a stream.

        Args:
            on_answer: Called with the replies before the answer ends.
        """

        async def finish(answer: _Answer) -> Replies:
            replies = await self.end(answer)
            on_answer(replies)
            return replies

        if not request.stream:
            return JSONResponse(formatter.body(await finish(self.begin(request))))
        stream = ReplyStream(request, formatter, self.episode.tokenizer, self.record.format)
        answer = self.begin(request, stream)
        answer.add_done_callback(lambda _: stream.close())
        if not await stream.has_begun():
            await self.end(answer)  # raises an error while the HTTP status can still report it
        events = stream.events(lambda: finish(answer))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _replies(
        self, request: ChatRequest | CompletionRequest, listener: Listener | None
    ) -> Replies | ApiError:
        try:
            if isinstance(request, ChatRequest):
                return await self.record.chat(request, listener)
            return await self.record.complete(request, listener)
        except ApiError as error:
            return error

    def _check(self, request: GenerateRequest) -> None:
        if request.model != MODEL_NAME:
            raise ApiError(
                404,
                f"unknown model {request.model!r}; use {MODEL_NAME!r}",
                param="model",
                code="model_not_found",
            )
        if request.temperature not in (None, self._temperature):
            raise invalid(
                f"the run samples at temperature {self._temperature:g}, got {request.temperature:g}; remove "
                "temperature, or set rollout.sampling.temperature",
                param="temperature",
            )


def _has_more_values(body: bytearray, max_values: int) -> bool:
    """Returns True if a JSON text has more values, in arrays and objects, than may be parsed at once."""
    num_values = sum(map(body.count, (b"{", b"[", b",")))
    if num_values <= _MAX_OBJECTS:
        return False
    if num_values > _VALUES_IN_TEXTS * max_values:
        return True
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return (
        outside.count(b"{") > _MAX_OBJECTS or outside.count(b"[") + outside.count(b",") > max_values
    )


def _ended() -> ApiError:
    return ApiError(503, "the rollout ended the episode", code="episode_ended")
