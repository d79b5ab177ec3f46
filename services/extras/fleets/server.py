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
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.extras.fleets.answers import RefusedError, read_body
from services.extras.fleets.protocol import (
    API,
    ATTACH,
    GENERATE,
    LEASE_S,
    LOAD,
    LOAD_TIMEOUT_S,
    PREFIX,
    SESSION_HEADER,
    STATE,
    VERSION_HEADER,
    WEIGHTS,
    WITHOUT_TOKEN,
)
from services.extras.fleets.staging import SharedMemory, StagedWeights
from services.weightsync.plan import TensorSpec

logger = logging.getLogger(__name__)

_OPEN: Final = frozenset({"/health", "/ping"})
"""Paths without a token: probes of an orchestrator have none."""


_WORKERS_TIMEOUT_S: Final = LOAD_TIMEOUT_S - 10.0
"""Time-out of a load in the workers: the rollout still waits for its reason."""


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
        self._staged: StagedWeights | None = None
        self._changing = asyncio.Lock()
        self._routes: Mapping[
            tuple[str, str], Callable[[Request], Awaitable[Mapping[str, Any]]]
        ] = {
            ("GET", STATE): self._state,
            ("POST", ATTACH): self._attach,
            ("DELETE", ATTACH): self._detach,
            ("POST", WEIGHTS): self._announce,
            ("PUT", WEIGHTS): self._receive,
            ("POST", LOAD): self._load,
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
            if path.startswith(PREFIX):
                response = JSONResponse(dict(await self._answer(request, path)))
            elif path == GENERATE and SESSION_HEADER in request.headers:
                await self._generate(request, send)
                return
            else:
                await self._app(scope, receive, send)
                return
        except RefusedError as error:
            response = JSONResponse({"error": error.message}, status_code=error.status)
        await response(scope, receive, send)

    async def _answer(self, request: Request, path: str) -> Mapping[str, Any]:
        route = WEIGHTS if path.startswith(f"{WEIGHTS}/") else path
        handler = self._routes.get((request.method, route))
        if handler is None:
            raise RefusedError(404, f"{request.method} {path} is no operation of a fleet")
        return await handler(request)

    async def _state(self, request: Request) -> Mapping[str, Any]:
        if SESSION_HEADER in request.headers:
            self._check_session(request)
        return self._described(request)

    async def _attach(self, request: Request) -> Mapping[str, Any]:
        owner = str((await read_body(request)).get("owner", ""))
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
            self._session = _Session(uuid.uuid4().hex, owner, time.monotonic())
            self._withdraw()
            logger.warning("a rollout attached", extra={"owner": owner})
            return {"session": self._session.session_id, **self._described(request)}

    async def _detach(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        async with self._change():
            self._check_session(request)
            self._session = None
            self._withdraw()
        return {}

    async def _announce(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        body = await read_body(request)
        async with self._change():
            self._check_session(request)
            memory = None if self._staged is None else self._staged.memory
            self._staged = None
            try:
                tensors = [
                    TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in body["tensors"]
                ]
                self._staged = await asyncio.to_thread(
                    StagedWeights, int(body["version"]), tensors, int(body["bucket_bytes"]), memory
                )
            except (KeyError, TypeError, ValueError) as error:
                _close(memory)
                raise RefusedError(400, f"the announced weights have no layout: {error}") from error
            except (OSError, RuntimeError) as error:
                _close(memory)
                raise RefusedError(507, f"no memory for the announced weights: {error}") from error
            return {"num_buckets": self._staged.num_buckets}

    async def _receive(self, request: Request) -> Mapping[str, Any]:
        self._check_session(request)
        staged = self._staged_version(request.headers.get(VERSION_HEADER))
        try:
            index = int(request.url.path.rpartition("/")[2])
        except ValueError as error:
            raise RefusedError(404, f"no such bucket: {error}") from error
        try:
            bucket = staged.begin(index).numpy()
        except IndexError as error:
            raise RefusedError(404, f"no such bucket: {error}") from error
        except ValueError as error:
            raise RefusedError(409, f"{error}; announce the version again") from error
        position = 0
        try:
            async for part in request.stream():
                # A later announcement reuses the memory.
                self._check_session(request)
                if staged is not self._staged:
                    raise RefusedError(409, f"version {staged.version} is no longer expected")
                end = position + len(part)
                if end > len(bucket):
                    raise RefusedError(413, f"bucket {index} has {len(bucket)} bytes, not more")
                bucket[position:end] = memoryview(part)
                position = end
        except ClientDisconnect as error:
            raise RefusedError(400, f"bucket {index} was interrupted") from error
        if position != len(bucket):
            raise RefusedError(400, f"bucket {index} has {len(bucket)} bytes, got {position}")
        await asyncio.to_thread(staged.finish, index)
        return {}

    async def _load(self, request: Request) -> Mapping[str, Any]:
        session = self._check_session(request)
        body = await read_body(request)
        async with self._change():
            self._check_session(request)
            staged = self._staged_version(body.get("version"))
            if staged.missing:
                raise RefusedError(
                    409, f"{staged.missing} of {staged.num_buckets} buckets have not arrived"
                )
            digest = staged.digest()
            if digest != body.get("digest"):
                raise RefusedError(
                    422,
                    f"the digest of the received weights is {digest[:12]}, expected "
                    f"{str(body.get('digest'))[:12]}",
                )
            self._withdraw()
            # An update that ends half-way must end in the workers nevertheless, whoever still waits for it.
            workers = await asyncio.shield(self._load_in_workers(request, staged))
            session.seen_at = time.monotonic()
            if self._session is not session:
                raise RefusedError(412, "another owner attached during the update")
            differing = sorted({name for worker in workers for name in worker["differing"]})
            if not differing:
                self._version, self._digest = staged.version, digest
            ways = sorted({str(worker["way"]) for worker in workers})
            return {"differing": differing, "ways": ways, **self._described(request)}

    async def _load_in_workers(
        self, request: Request, staged: StagedWeights
    ) -> list[dict[str, Any]]:
        engine = request.app.state.engine_client
        try:
            async with asyncio.timeout(_WORKERS_TIMEOUT_S):
                workers: list[dict[str, Any]] = await engine.collective_rpc(
                    "load_fleet_weights", args=(staged.description(),)
                )
        except TimeoutError as error:
            # No version is in service by now, and the next load begins after this one.
            raise RefusedError(
                500,
                f"the engine did not load version {staged.version} within {_WORKERS_TIMEOUT_S:.0f} s; "
                "restart the server if this repeats",
            ) from error
        except Exception as error:
            logger.exception("weights were not loaded")
            raise RefusedError(
                422,
                f"the engine did not load version {staged.version}: {error}; start vLLM with "
                "--worker-extension-cls services.extras.fleets.worker.FleetWorker",
            ) from error
        return workers

    async def _generate(self, request: Request, send: Send) -> None:
        """Lets a request sample while the version that it names is in service, and no longer."""
        self._check_session(request)
        version = request.headers.get(VERSION_HEADER)
        if self._version is None or version != str(self._version):
            raise RefusedError(
                412,
                f"the request is for weight version {version}, but this server serves {self._version}",
            )
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

    def _withdraw(self) -> None:
        """Takes the version out of service; responses that still run end without further tokens."""
        self._era += 1
        self._version, self._digest = None, ""

    def _check_session(self, request: Request) -> _Session:
        session, given = self._session, request.headers.get(SESSION_HEADER, "")
        if session is None or not hmac.compare_digest(session.session_id, given):
            raise RefusedError(
                412, "this session has ended: the server was restarted, or another owner attached"
            )
        session.seen_at = time.monotonic()
        return session

    def _staged_version(self, version: object) -> StagedWeights:
        if self._staged is None or str(self._staged.version) != str(version):
            staged = None if self._staged is None else self._staged.version
            raise RefusedError(409, f"version {version} is not announced (announced: {staged})")
        return self._staged

    def _described(self, request: Request) -> Mapping[str, Any]:
        session = self._session
        return {
            "api": API,
            "instance": self._instance,
            "owner": None if session is None else session.owner,
            "version": self._version,
            "digest": self._digest,
            "engine": describe_engine(
                request.app.state.engine_client.vllm_config, request.app.state.args
            ),
        }


def describe_engine(config: Any, arguments: Any) -> dict[str, Any]:
    """Returns what a rollout must know about a server's engine.

    Args:
        config: vLLM's configuration.
        arguments: Arguments of the server.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    return {
        "max_model_len": int(model.max_model_len),
        "vocab_size": int(text.vocab_size),
        "num_hidden_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "dtype": str(model.dtype).removeprefix("torch."),
        "logprobs_mode": str(getattr(model, "logprobs_mode", "raw_logprobs")),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "kv_capacity_tokens": int((cache.num_gpu_blocks or 0) * cache.block_size),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "data_parallel_size": int(parallel.data_parallel_size),
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
    given = token.encode() if scheme.lower() == "bearer" else b""
    if keys and not any(hmac.compare_digest(key.encode(), given) for key in keys):
        raise RefusedError(401, "the token is missing or wrong; vLLM has it from VLLM_API_KEY")


def _close(memory: SharedMemory | None) -> None:
    if memory is not None:
        memory.close()
