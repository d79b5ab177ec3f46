"""Middleware of vLLM's server (``--middleware``) that makes it a member of a fleet.

It receives weights, verifies and loads them, and lets a request sample only under the version that the
request names. It needs none of vLLM's development endpoints, which no token protects: with this middleware
every path but the health checks needs the server's token.

A session belongs to one owner, the rollout that attached last. The server keeps the version in service per
session, so a restarted server, or one that another owner took over, answers 412 to requests of the old
session instead of sampling under weights that their sender does not know.
"""

import asyncio
import hmac
import json
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.extras.fleets.adapters import AdapterSession, SharedServer
from services.extras.fleets.answers import MAX_GROUP_BYTES, GroupRoom, RefusedError, read_body
from services.extras.fleets.direct.links import WorkerLinks
from services.extras.fleets.direct.messages import LOAD_METHOD
from services.extras.fleets.hosts import EngineHosts
from services.extras.fleets.protocol import (
    ADAPTERS,
    API,
    ATTACH,
    CUT,
    GENERATE,
    GROUP,
    LEASE_S,
    LOAD,
    PREFIX,
    SCHEDULER,
    SESSION_HEADER,
    STATE,
    TOKEN_LINES,
    VERSION_HEADER,
    WEIGHTS,
    WITHOUT_TOKEN,
    WORKERS_TIMEOUT_S,
)
from services.extras.fleets.uploads import Upload
from services.extras.fleets.vllm_adapters import VllmAdapters
from services.extras.fleets.vllm_tokens import VllmTokens
from services.extras.vllm.kind import MAX_IMAGE_TOKENS

logger = logging.getLogger(__name__)

_WHILE_SHARED: Final = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})
"""Paths of vLLM that stay open while runs share the server."""
_MAX_LOADS: Final = 64
_OPEN: Final = frozenset({"/health", "/ping"})
"""Paths without a token: probes of an orchestrator have none."""
_ENDING: Final = "this server was asked to end (SIGTERM)"


class _CutError(RuntimeError):
    """A response that began under a version which is no longer in service."""


@dataclass(slots=True)
class _Session:
    session_id: str
    owner: str
    seen_at: float


class FleetMember:
    """Serves a fleet's interface beside vLLM's own.

    Args:
        app: The application to wrap; its state has vLLM's ``engine_client`` and ``args``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._instance = uuid.uuid4().hex
        self._session: _Session | None = None
        self._version: int | None = None
        self._digest = ""
        self._era = 0
        """Number of changes of the version in service; a response of an earlier era is cut."""
        self._upload = Upload(self._check_session)
        self._links: WorkerLinks | None = None
        self._shared: SharedServer | None = None
        self._thawing: asyncio.Future[None] | None = None
        self._tokens: VllmTokens | None = None
        """Responses that cross changes of the weights; None before the first request, or without them."""
        self._group_room = GroupRoom()
        self._changing = asyncio.Lock()
        self._is_watched = False
        """True once the end of the engine is watched."""
        self._is_ending = False
        """True once vLLM was asked to end."""
        self._loads: deque[Mapping[str, float]] = deque(maxlen=_MAX_LOADS)
        """Durations of the newest loads' phases in milliseconds."""
        self._routes: Mapping[
            tuple[str, str], Callable[[Request], Awaitable[Mapping[str, Any]]]
        ] = {
            ("GET", STATE): self._state,
            ("POST", ATTACH): self._attach,
            ("DELETE", ATTACH): self._detach,
            ("POST", WEIGHTS): self._announce,
            ("PUT", WEIGHTS): self._receive,
            ("POST", LOAD): self._load,
            ("POST", GROUP): self._pass_messages,
            ("POST", CUT): self._cut_requests,
        }
        self._shared_routes = {
            ("GET", STATE): self._shared_state,
            ("DELETE", ATTACH): self._shared_detach,
            ("POST", WEIGHTS): self._shared_announce,
            ("PUT", WEIGHTS): self._shared_receive,
            ("POST", LOAD): self._shared_load,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        request = Request(scope, receive)
        try:
            if path not in _OPEN:
                _authorize(request, path)
            if path.startswith(PREFIX) or SESSION_HEADER in request.headers:
                self._check_goes_on(request)
            if path.startswith(PREFIX):
                response = JSONResponse(dict(await self._answer(request, path)))
            elif path == GENERATE and self._is_shared(request):
                await self._sharing(request).generate(request, self._app, receive, send)
                return
            elif path == GENERATE and SESSION_HEADER in request.headers:
                await self._generate(request, receive, send)
                return
            else:
                self._check_open(request, path)
                await self._app(scope, receive, send)
                return
        except RefusedError as error:
            response = JSONResponse({"error": error.message}, status_code=error.status)
        except ClientDisconnect:
            return  # a response of its segment was cut before the request had arrived
        await response(scope, receive, send)

    def _check_goes_on(self, request: Request) -> None:
        """Refuses runs once vLLM was asked to end, by SIGTERM: its engine then ends new requests at once.

        Raises:
            RefusedError: If so.
        """
        engine = request.app.state.engine_client
        # Engines that stand for vLLM have no such method.
        if not self._is_watched and hasattr(engine, "shutdown"):
            shutdown = engine.shutdown

            def end(*arguments: Any, **options: Any) -> Any:
                self._is_ending = True
                return shutdown(*arguments, **options)

            engine.shutdown = end
        self._is_watched = True
        if self._is_ending:
            raise RefusedError(412, _ENDING)

    def _check_open(self, request: Request, path: str) -> None:
        """Refuses vLLM's other paths while runs share the server: there any run could name any adapter.

        Raises:
            RefusedError: If so.
        """
        if path not in _WHILE_SHARED and self._sharing(request).owners:
            raise RefusedError(
                403, f"runs share this server, which answers only requests of theirs, not {path}"
            )

    async def _answer(self, request: Request, path: str) -> Mapping[str, Any]:
        route = WEIGHTS if path.startswith(f"{WEIGHTS}/") else path
        routes = self._shared_routes if self._is_shared(request) else self._routes
        handler = routes.get((request.method, route))
        if handler is None:
            raise RefusedError(404, f"{request.method} {path} is no operation of a fleet")
        return await handler(request)

    async def _state(self, request: Request) -> Mapping[str, Any]:
        if SESSION_HEADER in request.headers:
            self._check_session(request)
        return self._described(request)

    async def _attach(self, request: Request) -> Mapping[str, Any]:
        body = await read_body(request)
        owner, sharing = str(body.get("owner", "")), self._sharing(request)
        holds_adapters = body.get("holds") == ADAPTERS
        async with self._change():
            # Checked here, because an owner whose weights load now is silent until they are loaded.
            session = self._session
            if session is not None and session.owner != owner:
                idle_s = time.monotonic() - session.seen_at
                if idle_s < LEASE_S:
                    raise RefusedError(
                        409,
                        f"{session.owner!r} uses this server and was active {idle_s:.0f} s ago; end that "
                        "run, or name another server",
                    )
            if holds_adapters:
                return await self._attach_adapters(request, body)
            if sharing.owners:
                raise RefusedError(
                    409,
                    f"{', '.join(sharing.owners)} use this server with adapters, which need its base "
                    "weights; end these runs, or name another server",
                )
            if sharing.max_adapters:
                raise RefusedError(
                    422,
                    "this server keeps its base weights for adapters (--enable-lora); start it without that "
                    "option for a run that brings whole weights",
                )
            self._session = _Session(uuid.uuid4().hex, owner, time.monotonic())
            self._end_links()
            self._withdraw()
            logger.warning("a rollout attached", extra={"owner": owner})
            return {"session": self._session.session_id, **self._described(request)}

    async def _attach_adapters(
        self, request: Request, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        sharing = self._sharing(request)
        if not sharing.max_adapters:
            raise RefusedError(
                422,
                "this server has no adapters; start vLLM with --enable-lora --max-loras and "
                "--max-lora-rank, or set trainer.lora.sync to merged",
            )
        try:
            share = float(body.get("share", 1.0))
        except (TypeError, ValueError) as error:
            raise RefusedError(400, f"share is no number: {error}") from error
        session = await sharing.attach(
            str(body.get("owner", "")), proof=str(body.get("proof", "")), share=share
        )
        return {"session": session.session_id, **self._described(request, session)}

    async def _shared_state(self, request: Request) -> Mapping[str, Any]:
        return self._described(request, self._sharing(request).session(request))

    async def _shared_detach(self, request: Request) -> Mapping[str, Any]:
        await self._sharing(request).detach(request)
        return {}

    async def _shared_announce(self, request: Request) -> Mapping[str, Any]:
        return await self._sharing(request).session(request).upload.announce(request)

    async def _shared_receive(self, request: Request) -> Mapping[str, Any]:
        return await self._sharing(request).session(request).upload.receive(request)

    async def _shared_load(self, request: Request) -> Mapping[str, Any]:
        session = await self._sharing(request).load(request)
        return {"differing": [], "ways": ["adapter"], **self._described(request, session)}

    def _sharing(self, request: Request) -> SharedServer:
        """Returns the sessions of runs that share this server."""
        if self._shared is None:
            state = request.app.state
            engine = getattr(state, "slipstream_adapters", None) or VllmAdapters(state)
            self._shared = SharedServer(engine)
        return self._shared

    def _is_shared(self, request: Request) -> bool:
        """Returns True if a request belongs to a run that shares this server."""
        session_id = request.headers.get(SESSION_HEADER, "")
        return bool(session_id) and self._sharing(request).has(session_id)

    async def _detach(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        async with self._change():
            self._check_session(request)
            self._session = None
            self._end_links()
            self._withdraw()
        return {}

    def _end_links(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()

    async def _pass_messages(self, request: Request) -> Mapping[str, Any]:
        """Passes messages between the rollout and members of its weight group in the engine's workers."""
        self._check_session(request)
        body = await read_body(request)
        if body.get("open"):
            async with self._change():
                self._check_session(request)
                if self._links is None:
                    self._links = WorkerLinks()
                return {"devices": await self._links.open(request.app.state.engine_client)}
        if self._links is None:
            raise RefusedError(
                412, "the engine's workers have joined no weight group; open one first"
            )
        try:
            messages = [(int(number), dict(message)) for number, message in body["messages"]]
            wait_s = float(body["wait_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError(400, f"the messages have no form: {error!r}") from error
        answers = await self._links.exchange(messages, wait_s=wait_s)
        self._check_session(request)
        return {"messages": answers}

    async def _announce(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        async with self._change():
            self._check_session(request)
            return await self._upload.announce(request)

    async def _receive(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        return await self._upload.receive(request)

    async def _load(self, request: Request) -> Mapping[str, Any]:
        session = self._check_session(request)
        body = await read_body(request)
        async with self._change():
            self._check_session(request)
            if body.get("received_by") == "workers":
                version, digest = int(body["version"]), str(body["digest"])
                method, argument = LOAD_METHOD, json.dumps([version, digest])
            else:
                staged = self._upload.complete(body.get("version"), body.get("digest"))
                version, digest = staged.version, staged.digest()
                hosts = EngineHosts.of(request.app.state)
                method, argument = "load_fleet_weights", hosts.described(staged.description())
            self._withdraw(cuts_tokens=False)
            # An update that ends half-way must end in the workers, even if no client waits for it.
            workers = await asyncio.shield(
                self._load_in_workers(request, method, argument, version=version)
            )
            session.seen_at = time.monotonic()
            if self._session is not session:
                raise RefusedError(412, "another owner attached during the update")
            differing = sorted({name for worker in workers for name in worker["differing"]})
            if not differing:
                self._version, self._digest = version, digest
            ways = sorted({str(worker["way"]) for worker in workers})
            return {"differing": differing, "ways": ways, **self._described(request)}

    async def _load_in_workers(
        self, request: Request, method: str, argument: str, *, version: int
    ) -> list[dict[str, Any]]:
        engine, tokens = request.app.state.engine_client, self._find_tokens(request)
        served_version: int | None = None
        phases = {}
        began = time.perf_counter()

        def end_phase(name: str) -> None:
            nonlocal began
            now = time.perf_counter()
            phases[name], began = round(1e3 * (now - began), 1), now

        try:
            async with asyncio.timeout(WORKERS_TIMEOUT_S):
                if self._thawing is not None:
                    # Else the engine would continue in the middle of this load, and count one era less.
                    await asyncio.wait([self._thawing])
                    self._thawing = None
                if tokens is not None:
                    await tokens.freeze()
                end_phase("freeze")
                workers: list[dict[str, Any]] = await engine.collective_rpc(
                    method, args=(argument,)
                )
                end_phase("workers")
                if not any(worker["differing"] for worker in workers):
                    served_version = version
                    if tokens is not None:
                        await self._thaw(tokens, version)
                end_phase("thaw")
                self._loads.append({**phases, **workers[0].get("phases_ms", {})})
        except TimeoutError as error:
            # No version is in service by now, and the next load begins after this one.
            raise RefusedError(
                500,
                f"the engine did not load version {version} within {WORKERS_TIMEOUT_S:.0f} s; "
                "restart the server if this repeats",
            ) from error
        except Exception as error:
            if self._is_ending:
                raise RefusedError(412, _ENDING) from error
            logger.exception("weights were not loaded")
            raise RefusedError(
                422,
                f"the engine did not load version {version}: {error}; start vLLM with "
                "--worker-extension-cls services.extras.fleets.worker.FleetWorker",
            ) from error
        finally:
            if tokens is not None and served_version is None and self._thawing is None:
                # The engine does this once the load has ended, however late.
                self._thawing = asyncio.ensure_future(tokens.thaw(None))
        return workers

    async def _thaw(self, tokens: VllmTokens, version: int) -> None:
        try:
            await tokens.thaw(version)
        except BaseException:
            tokens.cut()
            raise

    def _find_tokens(self, request: Request) -> VllmTokens | None:
        if self._tokens is None:
            self._tokens = VllmTokens.of_engine(request.app.state.engine_client)
        return self._tokens

    async def _generate(self, request: Request, receive: Receive, send: Send) -> None:
        """Lets a request begin to sample only under the version that it names.

        A response of token lines goes on under the versions that follow; any other one is cut.
        """
        tokens = self._find_tokens(request)
        if tokens is not None and request.headers.get("accept") == TOKEN_LINES:
            self._check_session(request)
            async with self._group_room.taken(request) as free_room:
                body = await read_body(request, max_bytes=MAX_GROUP_BYTES)
                self._check_version(request)
                await tokens.respond(body, receive, send, on_passed=free_room)
            return
        version = self._check_version(request)
        era = self._era

        async def send_in_era(message: Message) -> None:
            if self._era != era:
                raise _CutError(f"weight version {version} is no longer in service")
            await send(message)

        try:
            await self._app(request.scope, request.receive, send_in_era)
        except Exception:
            # A response that streams fails in a group of tasks, whose error may be wrapped.
            if self._era == era:
                raise
            logger.debug("response cut", extra={"version": version})

    async def _cut_requests(self, request: Request) -> Mapping[str, Any]:
        """Ends requests of a group that the rollout no longer needs."""
        self._check_session(request)
        body = await read_body(request)
        try:
            group, numbers = str(body["group"]), [int(number) for number in body["numbers"]]
        except (LookupError, TypeError, ValueError) as error:
            raise RefusedError(400, f"a cut needs a group and numbers: {error!r}") from error
        if self._tokens is not None:
            self._tokens.cut_requests(group, numbers)
        return {}

    def _check_version(self, request: Request) -> str:
        """Returns the version that a request of the session names.

        Raises:
            RefusedError: With status 412 if another version is in service.
        """
        self._check_session(request)
        version = request.headers.get(VERSION_HEADER, "")
        if self._version is None or version != str(self._version):
            raise RefusedError(
                412,
                f"the request is for weight version {version}, but this server serves {self._version}",
            )
        return version

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Holds the right to change the session or the weights while the block runs.

        Raises:
            RefusedError: With status 425 if another change takes longer than ``LEASE_S``.
        """
        try:
            async with asyncio.timeout(LEASE_S):
                await self._changing.acquire()
        except TimeoutError as error:
            raise RefusedError(
                425, f"weights have been loading for more than {LEASE_S:.0f} s; ask again later"
            ) from error
        try:
            yield
        finally:
            self._changing.release()

    def _withdraw(self, *, cuts_tokens: bool = True) -> None:
        """Takes the version out of service; responses that still run end without further tokens.

        Args:
            cuts_tokens: False to let responses of token lines wait for the next version.
        """
        self._era += 1
        self._version, self._digest = None, ""
        if cuts_tokens and self._tokens is not None:
            self._tokens.cut()

    def _check_session(self, request: Request) -> _Session:
        session, session_id = self._session, request.headers.get(SESSION_HEADER, "")
        if session is None or not hmac.compare_digest(session.session_id, session_id):
            raise RefusedError(
                412, "this session has ended: the server was restarted, or another owner attached"
            )
        session.seen_at = time.monotonic()
        return session

    def _described(
        self, request: Request, shared: AdapterSession | None = None
    ) -> Mapping[str, Any]:
        """Returns the state of the server, as a session that shares it sees it, or the exclusive one."""
        owner = shared or self._session
        current = None if shared is None else shared.current
        version, digest = (
            (self._version, self._digest)
            if shared is None
            else (None, "")
            if current is None
            else (current.version, current.digest)
        )
        sharing = self._sharing(request)
        return {
            "api": API,
            "instance": self._instance,
            "owner": None if owner is None else owner.owner,
            "version": version,
            "digest": digest,
            "runs": sharing.usage(),
            "loads_ms": [*self._loads],
            "engine": {
                **describe_engine(
                    request.app.state.engine_client.vllm_config, request.app.state.args
                ),
                "max_adapters": sharing.max_adapters,
                "max_adapter_rank": sharing.max_rank,
            },
        }


def describe_engine(config: Any, arguments: Any) -> dict[str, Any]:
    """Returns what a rollout must know about a server's engine.

    Args:
        config: vLLM's configuration.
        arguments: Arguments of the server.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    max_image_tokens = int(getattr(getattr(model, "hf_config", None), MAX_IMAGE_TOKENS, 0))
    return {
        "max_model_len": int(model.max_model_len),
        "vocab_size": int(text.vocab_size),
        "num_hidden_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "dtype": str(model.dtype).removeprefix("torch."),
        "logprobs_mode": str(getattr(model, "logprobs_mode", "raw_logprobs")),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "max_images": (
            int(model.multimodal_config.get_limit_per_prompt("image")) if max_image_tokens else 0
        ),
        "max_image_tokens": max_image_tokens,
        "kv_capacity_tokens": int((cache.num_gpu_blocks or 0) * cache.block_size),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "data_parallel_size": int(parallel.data_parallel_size),
        "sends_token_lines": (getattr(config.scheduler_config, "scheduler_cls", None) == SCHEDULER),
        "api_processes": int(getattr(parallel, "_api_process_count", 1)),
        "takes_tokens": any(
            getattr(arguments, name, False) for name in ("enable_scale_out", "tokens_only")
        ),
    }


def _authorize(request: Request, path: str) -> None:
    """Refuses a request without the server's token; without a token, one that may replace weights.

    Raises:
        RefusedError: With status 401 or 403.
    """
    arguments = getattr(request.app.state, "args", None)
    keys = getattr(arguments, "api_key", None) or [
        os.environ.get("VLLM_API_KEY", "")  # noqa: TID251 -- vLLM's own variable, in vLLM's process
    ]
    keys = [key for key in ([keys] if isinstance(keys, str) else keys) if key]
    is_open = os.environ.get(WITHOUT_TOKEN) == "1"  # noqa: TID251 -- it has only vLLM's settings
    if not keys and not is_open and path.startswith(PREFIX):
        raise RefusedError(
            403,
            "this server has no token, so that anyone could replace its weights; start it with "
            f"VLLM_API_KEY, or with {WITHOUT_TOKEN}=1 if only trusted hosts reach it",
        )
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    credentials = token.encode() if scheme.lower() == "bearer" else b""
    if keys and not any(hmac.compare_digest(key.encode(), credentials) for key in keys):
        raise RefusedError(401, "the token is missing or wrong; vLLM has it from VLLM_API_KEY")
