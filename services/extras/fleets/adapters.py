"""Runs that share one server: each has its own adapters on the base model that the server loaded.

A session belongs to one run. The server derives the names of its adapters, which no run learns, sets the
name in each request, and lets a request sample only under an adapter version that its session has loaded.
A version that was replaced stays until its last request has ended, so that no token is sampled under another
one than its request named. A session without a sign of life ends, and its adapters are removed.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Send

from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.answers import RefusedError, read_body
from services.extras.fleets.protocol import LEASE_S, MAX_SHARE, SESSION_HEADER, VERSION_HEADER
from services.extras.fleets.share_metrics import SHARES
from services.extras.fleets.shares import QueueFullError, Ticket, TokenShares
from services.extras.fleets.staging import StagedWeights
from services.extras.fleets.uploads import Upload
from services.weightsync.adapters import frozen_digest

logger = logging.getLogger(__name__)

_MAX_VERSIONS: Final = 2
"""Versions of one run in service at once; requests of older ones are cut."""
_CLEANUP_EVERY_S: Final = 1.0
_REQUEST_KEYS: Final = frozenset({"token_ids", "sampling_params", "stream", "cache_salt"})
_SAMPLING_KEYS: Final = frozenset(
    {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("stop_token_ids", "ignore_eos", "detokenize", "logprobs", "prompt_logprobs"),
    }
)
_TOKENS: Final = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')
_ABORTED: Final = json.dumps(
    {"choices": [{"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
)


class AdapterEngine(Protocol):
    """Operations that an engine must offer to runs that share it."""

    @property
    def max_adapters(self) -> int:
        """Adapters that one step can use; 0 if the engine has none."""

    @property
    def max_rank(self) -> int:
        """Max rank of an adapter."""

    @property
    def slots(self) -> int:
        """Requests that it decodes at once."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that its cache holds."""

    async def base_digest(self) -> str:
        """Returns the digest of the base weights. Raises RefusedError."""

    async def load(self, lora_id: int, name: str, description: str) -> list[str]:
        """Loads an adapter; returns the digests of its tensors in the workers. Raises RefusedError."""

    async def remove(self, lora_id: int, name: str) -> None:
        """Removes an adapter that no request uses."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One version of a run's adapter in the engine."""

    name: str
    lora_id: int
    version: int
    digest: str
    tickets: set[Ticket] = field(default_factory=set)
    """Requests that use it, or wait to."""


@dataclass(eq=False, slots=True)
class AdapterSession:
    """The bond of one worker of a run and this server."""

    session_id: str
    owner: str
    proof: str
    """Secret with which the owner can take the session over."""
    share: float
    seen_at: float
    upload: Upload
    current: Adapter | None = None
    retired: list[Adapter] = field(default_factory=list)
    """Older versions that requests still use, oldest first."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def run(self) -> str:
        return self.owner.partition("/")[0]

    @property
    def adapters(self) -> list[Adapter]:
        return [*self.retired, *([self.current] if self.current is not None else [])]


class SharedServer:
    """Sessions of the runs that share a server.

    Args:
        engine: Loads and removes adapters.
    """

    def __init__(self, engine: AdapterEngine) -> None:
        self._engine = engine
        self._sessions: dict[str, AdapterSession] = {}
        self._num_adapters = 0
        self._shares: TokenShares | None = None
        self._cleaning: asyncio.Task[None] | None = None
        SHARES.add(self)

    @property
    def owners(self) -> list[str]:
        """Owners of the sessions."""
        return sorted(session.owner for session in self._sessions.values())

    @property
    def max_adapters(self) -> int:
        return self._engine.max_adapters

    @property
    def max_rank(self) -> int:
        return self._engine.max_rank

    def has(self, session_id: str) -> bool:
        """Returns True if a session with this id exists."""
        return session_id in self._sessions

    def usage(self) -> list[dict[str, Any]]:
        """Returns the use of the server by each run."""
        accounts = {} if self._shares is None else self._shares.accounts
        now = time.monotonic()
        return [
            {
                "run": session.run,
                "owner": session.owner,
                "share": session.share,
                "version": None if session.current is None else session.current.version,
                "adapters": len(session.adapters),
                "silent_s": round(now - session.seen_at, 1),
                "tokens": account.num_tokens,
                "requests": account.num_requests,
                "running": len(account.running),
                "waiting": len(account.waiting),
            }
            for session in sorted(self._sessions.values(), key=lambda entry: entry.owner)
            if (account := accounts.get(session.run)) is not None
        ]

    async def attach(self, owner: str, *, proof: str, share: float) -> AdapterSession:
        """Begins the session of a run; one of the same owner ends.

        Raises:
            RefusedError: If the owner's session belongs to another process, or the server is full.
        """
        await self._end_expired()
        if not owner or not 0 < share <= MAX_SHARE:
            raise RefusedError(
                400,
                f"owner must not be empty and share must be in (0, {MAX_SHARE:.0f}], got {share}",
            )
        run = owner.partition("/")[0]
        for session in [candidate for candidate in self._sessions.values() if candidate.run == run]:
            if not hmac.compare_digest(session.proof, proof):
                raise RefusedError(
                    409,
                    f"{session.owner!r} uses this server with other credentials; it ends "
                    f"{LEASE_S:.0f} s after its last sign of life",
                )
            if session.owner == owner:
                await self._end(session)
        if len(self._sessions) >= self._engine.max_adapters:
            raise RefusedError(
                409,
                f"{', '.join(self.owners)} use this server, which has {self._engine.max_adapters} "
                "adapters at once; end one of these runs, or start vLLM with a higher --max-loras",
            )
        upload = Upload(self.session)
        session = AdapterSession(uuid.uuid4().hex, owner, proof, share, time.monotonic(), upload)
        self._sessions[session.session_id] = session
        self._open_shares().join(run, share)
        if self._cleaning is None:
            self._cleaning = asyncio.ensure_future(self._clean())
        logger.warning("a run attached with adapters", extra={"owner": owner, "share": share})
        return session

    def _open_shares(self) -> TokenShares:
        if self._shares is None:
            engine = self._engine
            self._shares = TokenShares(slots=engine.slots, capacity_tokens=engine.capacity_tokens)
        return self._shares

    def session(self, request: Request) -> AdapterSession:
        """Returns the session that a request names, and renews it.

        Raises:
            RefusedError: If it has ended.
        """
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            raise RefusedError(
                412, "this session has ended: the server was restarted, or it expired"
            )
        session.seen_at = time.monotonic()
        return session

    async def detach(self, request: Request) -> None:
        """Ends the session that a request names; its adapters are removed."""
        await self._end(self.session(request))

    async def load(self, request: Request) -> AdapterSession:
        """Loads a version that has arrived and puts it into service in addition to the one before.

        Raises:
            RefusedError: If the base, the received bytes or the loaded tensors are other ones.
        """
        session, body = self.session(request), await read_body(request)
        # The first load reads the base weights, which may take longer than a session without a sign of life.
        async with session.changing:
            staged = session.upload.complete(body.get("version"), body.get("digest"))
            base = await self._engine.base_digest()
            if base != body.get("base"):
                raise RefusedError(
                    422,
                    f"the server's base weights have digest {base[:12]}, but the run's have "
                    f"{str(body.get('base'))[:12]}; start vLLM with the files of model.path in the dtype of "
                    "the run, or set trainer.lora.sync to merged and give the run servers of its own",
                )
            self.session(request)  # its memory ends with it
            adapter = await self._load(session, staged)
        session.seen_at = time.monotonic()
        if self._sessions.get(session.session_id) is not session:
            await self._engine.remove(adapter.lora_id, adapter.name)
            raise RefusedError(412, "the session ended while its adapter was loaded")
        if session.current is not None:
            session.retired.append(session.current)
        session.current = adapter
        for old in session.retired[: max(0, len(session.retired) + 1 - _MAX_VERSIONS)]:
            _cut(old)
        await self._remove_unused(session)
        return session

    async def _load(self, session: AdapterSession, staged: StagedWeights) -> Adapter:
        self._num_adapters += 1
        name = f"{session.run}:{staged.version}:{secrets.token_hex(8)}"
        adapter = Adapter(name, self._num_adapters, staged.version, staged.digest())
        staged_digest = await asyncio.to_thread(_tensors_digest, staged)
        loaded = await self._engine.load(adapter.lora_id, name, staged.description())
        if {*loaded} != {staged_digest}:
            await self._engine.remove(adapter.lora_id, name)
            raise RefusedError(
                422,
                f"the engine holds another adapter than version {staged.version}: its digests are "
                f"{sorted(digest[:12] for digest in loaded)}, expected {staged_digest[:12]}",
            )
        return adapter

    async def generate(self, request: Request, app: ASGIApp, receive: Receive, send: Send) -> None:
        """Lets a request sample under the adapter version that it names, in its run's share.

        Raises:
            RefusedError: If the version is not in service, or the request asks for what runs must not.
        """
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return
        # Checked afterwards, because the session or its version may end while the request arrives.
        session = self.session(request)
        version = request.headers.get(VERSION_HEADER)
        adapter = session.current
        if adapter is None or version != str(adapter.version):
            serves = None if adapter is None else adapter.version
            raise RefusedError(
                412, f"the request is for weight version {version}, but this server serves {serves}"
            )
        ticket, content = _prepared(session, adapter, body)
        response = _Response(
            app, request, content, receive, send, is_stream=bool(body.get("stream"))
        )
        ticket.yield_slot = response.cut
        shares = self._open_shares()
        response.on_tokens = lambda number: shares.record(ticket, number)
        adapter.tickets.add(ticket)
        try:
            await response.run(shares, ticket)
        finally:
            adapter.tickets.discard(ticket)
            if adapter is not session.current:
                await self._remove_unused(session)

    async def _clean(self) -> None:
        """Ends sessions without a sign of life, as long as there are sessions."""
        try:
            while self._sessions:
                await asyncio.sleep(_CLEANUP_EVERY_S)
                await self._end_expired()
        finally:
            self._cleaning = None

    async def _end_expired(self) -> None:
        now = time.monotonic()
        for session in [*self._sessions.values()]:
            # A load is a sign of life.
            if now - session.seen_at > LEASE_S and not session.changing.locked():
                logger.warning("a session expired", extra={"owner": session.owner})
                await self._end(session)

    async def _end(self, session: AdapterSession) -> None:
        if self._sessions.pop(session.session_id, None) is None:
            return
        session.upload.close()
        if session.current is not None:
            session.retired.append(session.current)
            session.current = None
        for adapter in session.retired:
            _cut(adapter)
        if self._shares is not None and not any(
            peer.run == session.run for peer in self._sessions.values()
        ):
            self._shares.leave(session.run)
        await self._remove_unused(session)

    async def _remove_unused(self, session: AdapterSession) -> None:
        unused = [adapter for adapter in session.retired if not adapter.tickets]
        session.retired = [adapter for adapter in session.retired if adapter.tickets]
        for adapter in unused:
            await self._engine.remove(adapter.lora_id, adapter.name)


def _cut(adapter: Adapter) -> None:
    for ticket in [*adapter.tickets]:
        ticket.yield_slot()


def _tensors_digest(staged: StagedWeights) -> str:
    tensors = open_shared(staged.description())
    return bytes(frozen_digest(tensors.items()).tolist()).hex()


def _prepared(
    session: AdapterSession, adapter: Adapter, body: Mapping[str, Any]
) -> tuple[Ticket, bytes]:
    """Returns the ticket of a request, and the request with the adapter's name.

    Raises:
        RefusedError: If it has keys by which a run could reach others, or no tokens.
    """
    parameters, token_ids = body.get("sampling_params"), body.get("token_ids")
    if not isinstance(parameters, dict) or not isinstance(token_ids, list):
        raise RefusedError(
            400, "the request needs the list token_ids and the object sampling_params"
        )
    unknown = sorted({*body} - _REQUEST_KEYS) + sorted({*parameters} - _SAMPLING_KEYS)
    if unknown:
        raise RefusedError(
            400,
            f"{', '.join(unknown)} cannot be set on a server that runs share; requests may have "
            f"{', '.join(sorted(_REQUEST_KEYS))}, and sampling_params {', '.join(sorted(_SAMPLING_KEYS))}",
        )
    max_tokens = parameters.get("max_tokens")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise RefusedError(
            400, f"sampling_params.max_tokens must be at least 1, got {max_tokens!r}"
        )
    ticket = Ticket(
        session.run,
        len(token_ids),
        max_tokens,
        # The canary, on which the run's other requests wait.
        is_urgent=not body.get("stream"),
    )
    # Blocks that another run computed would show by their speed what it sampled.
    salt = f"{session.session_id}.{body.get('cache_salt', '')}"
    return ticket, json.dumps({**body, "model": adapter.name, "cache_salt": salt}).encode()


class _Response:
    """Answers one request through the engine's application; it can be cut at any time.

    A stream that is cut ends with the finish reason ``abort``, after which its client continues elsewhere.
    """

    def __init__(
        self,
        app: ASGIApp,
        request: Request,
        content: bytes,
        receive: Receive,
        send: Send,
        *,
        is_stream: bool,
    ) -> None:
        self._app = app
        self._request = request
        self._content = content
        self._send = send
        self._is_stream = is_stream
        self._is_sent = self._is_started = self._is_ended = False
        self._is_cut = asyncio.Event()
        self._receive = receive
        self._gone: asyncio.Task[Message] | None = None
        self.on_tokens: Any = lambda number: None

    def cut(self) -> None:
        """Ends the response after the tokens that were sent."""
        self._is_cut.set()

    async def run(self, shares: TokenShares, ticket: Ticket) -> None:
        """Waits for a slot, and answers.

        Raises:
            RefusedError: If the queue is full, or the session ended before the response began.
        """
        self._gone = asyncio.ensure_future(self._receive())
        cut = asyncio.ensure_future(self._is_cut.wait())
        working = asyncio.ensure_future(self._work(shares, ticket))
        try:
            await asyncio.wait({working, cut, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done() and not self._is_started:
                return  # nobody waits for it
            if not cut.done():
                await asyncio.wait({working, cut}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not working.cancelled():
                working.result()
                return
        except QueueFullError as error:
            raise RefusedError(429, f"{error}; send fewer requests at once") from error
        finally:
            for task in (working, cut, self._gone):
                task.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self._abort()

    async def _work(self, shares: TokenShares, ticket: Ticket) -> None:
        async with shares.slot(ticket):
            await self._app(self._scope(), self._replayed, self._count)

    def _scope(self) -> dict[str, Any]:
        scope = dict(self._request.scope)
        length = str(len(self._content)).encode()
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() not in (b"content-length", b"transfer-encoding", b"x-request-id")
        ]
        scope["headers"] = [*headers, (b"content-length", length)]
        return scope

    async def _replayed(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        assert self._gone is not None
        return await asyncio.shield(self._gone)

    async def _count(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
        elif self._is_stream and message.get("body"):
            number = sum(
                ids.count(b",") + 1 for ids in _TOKENS.findall(message["body"]) if ids.strip()
            )
            if number:
                self.on_tokens(number)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_ended = True

    async def _abort(self) -> None:
        """Reports to the client that the response was cut."""
        if self._is_ended:
            return
        if not self._is_stream:
            if not self._is_started:
                refusal = JSONResponse({"error": "the request was cut; send it again"}, 412)
                await refusal(self._request.scope, self._receive, self._send)
            return
        if not self._is_started:
            headers = [(b"content-type", b"text/event-stream")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        end = f"data: {_ABORTED}\n\ndata: [DONE]\n\n".encode()
        await self._send({"type": "http.response.body", "body": end, "more_body": False})
