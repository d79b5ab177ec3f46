"""HTTP server of the endpoint: routes, API keys, and one session per episode.

It speaks OpenAI's chat completions, completions and responses, and Anthropic's messages.

::

    agent --POST /v1/chat/completions, Bearer key--> _Session --> EpisodeRecord --> Episode --> Engine
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.http.limits import MAX_UNAUTHENTICATED_EPISODES, admit
from services.common.http.server import serve_http
from services.common.task_group import TaskGroup, leaves
from services.rollout.openai import anthropic
from services.rollout.openai.record import EpisodeRecord, History, Listener, Replies
from services.rollout.openai.replies import CompletionFormatter
from services.rollout.openai.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Message,
    invalid,
    parse_chat,
    parse_completion,
    too_long,
)
from services.rollout.openai.responses import ResponsesFormatter, parse_responses
from services.rollout.openai.streaming import Formatter, ReplyStream
from services.rollout.workflows.base import Episode, Interrupted

MODEL_NAME = "policy"
"""Name of the only model that the endpoint serves."""

_CHAT_PATH = "/v1/chat/completions"
# Longer than clients keep idle connections, so that the server closes none while a client sends a
# request; longer than most tool calls.
_KEEP_ALIVE_S = 75
# Size of all concurrent requests: thousands of agents wait at once, each with its whole conversation.
_MAX_REQUEST_BYTES = 1 << 30
# A request may be this large: several times what its conversation can have as tokens. A larger one would
# stop all episodes of the process while it is read, only to be refused.
_MIN_REQUEST_BYTES = 1 << 20
_BYTES_PER_TOKEN = 64
_Answer = asyncio.Task[Replies | ApiError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address and credentials of an agent's episode."""

    base_url: str
    """Base URL for OpenAI clients; ends with ``/v1``."""
    api_key: str
    """Key of this episode, valid until the episode ends."""
    model: str = MODEL_NAME
    """Model name for requests."""


class _Session:
    """One episode and its running requests."""

    def __init__(
        self,
        episode: Episode,
        tasks: TaskGroup,
        temperature: float,
        *,
        tool_format: str,
        history: History,
    ) -> None:
        self.episode = episode
        self.record = EpisodeRecord(episode, tool_format, history)
        self._tasks = tasks
        self._temperature = temperature
        self._running: set[_Answer] = set()
        self.responses: dict[str, tuple[Message, ...]] = {}
        """Messages of each answer of the Responses API, the reply included, by its id."""

    def begin(
        self, request: ChatRequest | CompletionRequest, listener: Listener | None = None
    ) -> "_Answer":
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

    async def end(self, task: "_Answer") -> Replies:
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


class Endpoint:
    """Serves all open episodes to their agents.

    Args:
        base_url: URL by which agents reach the endpoint.
        temperature: The run's sampling temperature; requests may repeat it, but not change it.
        tool_format: Format in which the policy calls tools, or ``auto``.
        history: Treatment of earlier reasoning; see :class:`EpisodeRecord`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        temperature: float,
        tool_format: str = "auto",
        history: History = "template",
    ) -> None:
        self._base_url = base_url
        self._history: History = history
        self._temperature = temperature
        self._tool_format = tool_format
        self._sessions: dict[str, _Session] = {}
        self._numbers = itertools.count()

    @classmethod
    @asynccontextmanager
    async def serve(
        cls,
        bind: str,
        *,
        host: str,
        temperature: float,
        tool_format: str = "auto",
        history: History = "template",
    ) -> AsyncIterator["Endpoint"]:
        """Serves until the block ends.

        Args:
            bind: ``host:port``; port 0 selects a free one.
            host: Host name by which agents reach the endpoint.
            tool_format: Format in which the policy calls tools, or ``auto``.
            history: Treatment of earlier reasoning; see :class:`EpisodeRecord`.
        """
        endpoint = cls("", temperature=temperature, tool_format=tool_format, history=history)
        serving = serve_http(
            bind,
            endpoint.app(),
            max_unauthenticated=MAX_UNAUTHENTICATED_EPISODES,
            max_request_bytes=_MAX_REQUEST_BYTES,
            keep_alive_s=_KEEP_ALIVE_S,
        )
        async with serving as port:
            endpoint._base_url = f"http://{host}:{port}/v1"
            yield endpoint

    def app(self) -> ASGIApp:
        chat = self._answers(self._chat)
        others = Starlette(
            routes=[
                Route(_CHAT_PATH, chat, methods=["POST"]),
                Route("/v1/completions", self._answers(self._complete), methods=["POST"]),
                Route("/v1/responses", self._answers(self._responses), methods=["POST"]),
                Route("/v1/messages", self._answers(self._messages), methods=["POST"]),
                Route("/v1/messages/count_tokens", self._answers(self._count), methods=["POST"]),
                Route("/v1/models", self._answers(self._models)),
                Route("/v1/models/{name}", self._answers(self._models)),
            ]
        )

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            # Chat requests bypass Starlette's routing, which takes as long as parsing the request.
            if scope["path"] == _CHAT_PATH and scope["method"] == "POST":
                response = await chat(Request(scope, receive))
                await response(scope, receive, send)
            else:
                await others(scope, receive, send)

        return serve

    @asynccontextmanager
    async def open(self, episode: Episode) -> AsyncIterator[Access]:
        """Opens an episode to an agent while the block runs.

        Raises:
            Interrupted: If the episode was interrupted; the sampled tokens are recorded.
        """
        key = f"ep-{secrets.token_urlsafe(32)}"
        try:
            async with TaskGroup() as tasks:
                session = self._sessions[key] = _Session(
                    episode,
                    tasks,
                    self._temperature,
                    tool_format=self._tool_format,
                    history=self._history,
                )
                try:
                    yield Access(base_url=self._base_url, api_key=key)
                finally:
                    del self._sessions[key]
                    session.close()
        except BaseExceptionGroup as errors:
            raise _cause(errors) from None

    def _answers(
        self, handle: Callable[[Request, _Session], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handle(request, self._session(request))
            except ApiError as error:
                is_anthropic = request.url.path.startswith("/v1/messages")
                body = anthropic.error_body(error) if is_anthropic else error.body
                return JSONResponse(body, error.status, error.headers)

        return answer

    def _session(self, request: Request) -> _Session:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise ApiError(
                401,
                "this API key does not belong to a running episode; use the key that the agent received",
                code="invalid_api_key",
            )
        admit(request.scope)
        return session

    async def _models(self, request: Request, session: _Session) -> Response:
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "slipstream"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != MODEL_NAME:
            raise ApiError(
                404, f"unknown model {name!r}; use {MODEL_NAME!r}", code="model_not_found"
            )
        return JSONResponse(model)

    async def _chat(self, request: Request, session: _Session) -> Response:
        return await self._reply(parse_chat(await _body(request, session)), session)

    async def _complete(self, request: Request, session: _Session) -> Response:
        return await self._reply(parse_completion(await _body(request, session)), session)

    async def _reply(self, request: ChatRequest | CompletionRequest, session: _Session) -> Response:
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        formatter = CompletionFormatter(
            request,
            tokenizer=session.episode.tokenizer,
            reply_id=f"{prefix}-{next(self._numbers)}",
            created=int(time.time()),
        )
        return await _answer(request, formatter, session)

    async def _messages(self, request: Request, session: _Session) -> Response:
        given = anthropic.parse_messages(await _body(request, session))
        formatter = anthropic.MessagesFormatter(given, reply_id=f"msg_{next(self._numbers)}")
        return await _answer(given.as_chat(), formatter, session)

    async def _count(self, request: Request, session: _Session) -> Response:
        chat = anthropic.parse_count(await _body(request, session))
        return JSONResponse({"input_tokens": await session.record.count(chat)})

    async def _responses(self, request: Request, session: _Session) -> Response:
        given = parse_responses(await _body(request, session))
        earlier: tuple[Message, ...] | None = ()
        if given.previous_response_id is not None:
            earlier = session.responses.get(given.previous_response_id)
        if earlier is None:
            raise ApiError(
                404,
                f"this episode has no response {given.previous_response_id!r}; send the whole input",
                param="previous_response_id",
            )
        chat = given.as_chat(earlier)
        reply_id = f"resp_{next(self._numbers)}"
        formatter = ResponsesFormatter(given, reply_id=reply_id, created=int(time.time()))

        def keep(replies: Replies) -> None:
            # The instructions are not kept, because the next request has its own.
            said = chat.messages[1 if given.instructions else 0 :]
            session.responses[reply_id] = (*said, replies.choices[0].message)

        return await _answer(chat, formatter, session, on_answer=keep)


async def _body(request: Request, session: _Session) -> bytes:
    """Returns the body of a request. Raises ApiError if the model's context cannot hold it."""
    episode = session.episode
    limit = _MIN_REQUEST_BYTES + _BYTES_PER_TOKEN * episode.limits.max_tokens
    if episode.images is not None:
        limit += episode.images.max_request_bytes
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            episode.is_full = True
            raise too_long(
                f"the request has more than {limit:,} bytes, so it has more tokens than the model's context "
                f"({episode.limits.max_tokens}); send a shorter conversation"
            )
    return bytes(body)


async def _answer(
    request: ChatRequest | CompletionRequest,
    formatter: Formatter,
    session: _Session,
    *,
    on_answer: Callable[[Replies], None] = lambda replies: None,
) -> Response:
    """Samples the replies to a request and returns them as one body or as a stream.

    Args:
        on_answer: Called with the replies before the answer ends.
    """

    async def finish(answer: _Answer) -> Replies:
        replies = await session.end(answer)
        on_answer(replies)
        return replies

    if not request.stream:
        return JSONResponse(formatter.body(await finish(session.begin(request))))
    stream = ReplyStream(request, formatter, session.episode.tokenizer, session.record.format)
    answer = session.begin(request, stream)
    answer.add_done_callback(lambda _: stream.close())
    if not await stream.has_begun():
        await session.end(answer)  # raises an error while the HTTP status can still report it
    events = stream.events(lambda: finish(answer))
    return StreamingResponse(events, media_type="text/event-stream")


def _ended() -> ApiError:
    return ApiError(503, "the rollout ended the episode", code="episode_ended")


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the error to raise: an interruption takes precedence over the errors that it caused."""
    found = leaves(errors)
    return next((error for error in found if isinstance(error, Interrupted)), found[0])
