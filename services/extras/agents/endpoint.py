"""HTTP server of the endpoint: routes, API keys, and one session per episode.

It speaks OpenAI's chat and text completions; packages add other protocols (``protocols.py``).

::

    agent --POST /v1/chat/completions, Bearer key--> Session --> EpisodeRecord --> Episode --> Engine
"""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.host import host_bytes_here
from services.common.http.limits import MAX_UNAUTHENTICATED_EPISODES, admit
from services.common.http.server import serve_http
from services.common.task_group import TaskGroup, leaves
from services.extras.agents.images import ImageMemory
from services.extras.agents.protocols import protocol_of
from services.extras.agents.record import History
from services.extras.agents.replies import CompletionFormatter
from services.extras.agents.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from services.extras.agents.session import MODEL_NAME, Session, new_id
from services.rollout.workflows.base import Episode, Interrupted

_CHAT_PATH = "/v1/chat/completions"
# Longer than clients keep idle connections, so that the server closes none while a client sends a
# request; longer than most tool calls.
_KEEP_ALIVE_S = 75
# Size of all concurrent requests: thousands of agents wait at once, each with its whole conversation.
_MAX_REQUEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address and credentials of an agent's episode."""

    base_url: str
    """Base URL for OpenAI clients; ends with ``/v1``."""
    api_key: str
    """Key of this episode, valid until the episode ends."""
    model: str = MODEL_NAME
    """Model name for requests."""


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
        self._sessions: dict[str, Session] = {}
        self._image_memory = ImageMemory(host_bytes_here())

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
        application = Starlette(
            routes=[
                Route(_CHAT_PATH, chat, methods=["POST"]),
                Route("/v1/completions", self._answers(self._complete), methods=["POST"]),
                Route("/v1/models", self._answers(self._models)),
                Route("/v1/models/{name}", self._answers(self._models)),
                Route("/{path:path}", self._of_protocol, methods=["POST"]),
            ]
        )

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            # Chat requests bypass Starlette's routing, which takes as long as parsing the request.
            if scope["path"] == _CHAT_PATH and scope["method"] == "POST":
                response = await chat(Request(scope, receive))
                await response(scope, receive, send)
            else:
                await application(scope, receive, send)

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
                session = self._sessions[key] = Session(
                    episode,
                    tasks,
                    self._temperature,
                    tool_format=self._tool_format,
                    history=self._history,
                    image_memory=self._image_memory,
                )
                try:
                    yield Access(base_url=self._base_url, api_key=key)
                finally:
                    del self._sessions[key]
                    session.close()
        except BaseExceptionGroup as errors:
            raise _cause(errors) from None

    def _answers(
        self, handle: Callable[[Request, Session], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handle(request, self._session(request))
            except ApiError as error:
                return JSONResponse(error.body, error.status, error.headers)

        return answer

    async def _of_protocol(self, request: Request) -> Response:
        """Answers a request by the protocol of an installed package that serves its path."""
        protocol = protocol_of(request.url.path)
        if protocol is None:
            raise HTTPException(404)
        try:
            return await protocol.paths[request.url.path](request, self._session(request))
        except ApiError as error:
            return JSONResponse(protocol.error_body(error), error.status, error.headers)

    def _session(self, request: Request) -> Session:
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

    async def _models(self, request: Request, session: Session) -> Response:
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "slipstream"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != MODEL_NAME:
            raise ApiError(
                404, f"unknown model {name!r}; use {MODEL_NAME!r}", code="model_not_found"
            )
        return JSONResponse(model)

    async def _chat(self, request: Request, session: Session) -> Response:
        return await self._reply(parse_chat(await session.body(request)), session)

    async def _complete(self, request: Request, session: Session) -> Response:
        return await self._reply(parse_completion(await session.body(request)), session)

    async def _reply(self, request: ChatRequest | CompletionRequest, session: Session) -> Response:
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        formatter = CompletionFormatter(
            request,
            tokenizer=session.episode.tokenizer,
            reply_id=new_id(f"{prefix}-"),
            created=int(time.time()),
        )
        return await session.answer(request, formatter)


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the error to raise: an interruption takes precedence over the errors that it caused."""
    causes = leaves(errors)
    return next((error for error in causes if isinstance(error, Interrupted)), causes[0])
