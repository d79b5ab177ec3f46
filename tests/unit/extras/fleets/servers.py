"""A server with the fleet's middleware around an engine whose logprobs show its weights."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from torch import Tensor
from transformers import Qwen2Config

from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.direct.member import ServerMember
from services.extras.fleets.direct.messages import JOIN_METHOD, LOAD_METHOD
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.server import FleetMember
from services.extras.fleets.vllm_server import VllmServer, build
from services.extras.fleets.weights import FleetWeights
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.engine_config import EngineConfig
from services.weightsync.weight_plan import TensorSpec
from services.wire.controller import WORKER_EVENTS
from tests.helpers.engines import running, until
from tests.helpers.ports import free_port

TOKEN = "a-token"
SPECS = (TensorSpec("bias", (4,), "float32"), TensorSpec("weight", (3, 5000), "float32"))
LOCAL = AddressPolicy(("127.0.0.1",))


def tensors(value: float) -> dict[str, Tensor]:
    """Returns weights whose logprobs are ``-value``."""
    return {"bias": torch.full((4,), value), "weight": torch.full((3, 5000), value)}


def fleet_weights(version: int, value: float) -> FleetWeights:
    return FleetWeights(version, SPECS, tensors(value))


class FakeEngine:
    """Engine in the place of vLLM's client: it samples token 7 with a logprob of its first weight."""

    def __init__(self) -> None:
        self.bias = 0.0
        self.differing: list[str] = []
        self.error: Exception | None = None
        self.poison: set[int] = set()
        """First tokens of the requests in which the engine fails."""
        self.refusals: list[Response] = []
        """Answers to the next requests for tokens."""
        self.malformed: list[str] = []
        self.entry: dict[str, Any] = {"token_id": 7}
        """Form of the token's name in an entry of logprobs."""
        """Events that each response begins with."""
        self.steps = asyncio.Semaphore(0)
        """Released once for each token that may be sampled."""
        self.scores = asyncio.Event()
        """Set while prompts are scored at once; otherwise they wait."""
        self.scores.set()
        self.num_sampled = 0
        self.requests: list[dict[str, Any]] = []
        self.num_workers = 1
        self.members: list[ServerMember] = []
        self.on_received: Callable[[Mapping[str, Tensor]], None] = lambda received: None
        """Called with the tensors of each version before its load."""
        self.on_dropped: Callable[[], None] = lambda: None
        """Called before their memory is freed."""
        self.adapters: dict[str, float] = {}
        """First value of each adapter, by the name that requests give."""
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=512,
                dtype=torch.float32,
                head_dtype=torch.float32,
                logprobs_mode="processed_logprobs",
                hf_text_config=SimpleNamespace(vocab_size=16, num_hidden_layers=1, hidden_size=8),
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
            parallel_config=SimpleNamespace(data_parallel_size=1, _api_process_count=1),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            lora_config=None,
        )

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        if method == JOIN_METHOD:
            return await asyncio.to_thread(self._join, json.loads(args[0]))
        if self.error is not None:
            raise self.error
        if method == LOAD_METHOD:
            await asyncio.to_thread(self._load_received, *json.loads(args[0]))
            return [{"way": "compared", "differing": self.differing}] * self.num_workers
        assert method == "load_fleet_weights"
        first, *_ = open_shared(args[0]).values()
        self.bias = float(first.flatten()[0])
        return [{"way": "compared", "differing": self.differing}]

    def _join(self, middleware: dict[str, str]) -> list[dict[str, Any]]:
        address, secret = middleware["address"], bytes.fromhex(middleware["secret"])
        self.members = [
            ServerMember(
                address,
                secret,
                number=number,
                device=torch.device("cpu"),
                on_received=lambda received: self.on_received(received),
                on_dropped=lambda: self.on_dropped(),
            )
            for number in range(self.num_workers)
        ]
        return [{"number": n, "device": m.device_name} for n, m in enumerate(self.members)]

    def _load_received(self, version: int, digest: str) -> None:
        values = set()
        for member in self.members:
            with member.held(version, digest) as received:
                values |= {
                    float(value) for tensor in received.values() for value in tensor.unique()
                }
        (self.bias,) = values

    def shutdown(self, timeout: float) -> None:
        """Lets running requests end, as vLLM's client does after SIGTERM."""

    def logprob(self, model: str | None = None) -> float:
        return -(self.bias if model is None else self.adapters[model])

    async def tokens(self, number: int, model: str | None = None) -> AsyncIterator[dict[str, Any]]:
        for index in range(number):
            await self.steps.acquire()
            self.num_sampled += 1
            entry = {**self.entry, "logprob": self.logprob(model)}
            reason = "length" if index == number - 1 else None
            choice = {
                "index": 0,
                "token_ids": [7],
                "logprobs": {"content": [entry]},
                "finish_reason": reason,
            }
            yield {"choices": [choice]}


async def _generate(request: Request) -> Response:
    engine: FakeEngine = request.app.state.engine_client
    body = await request.json()
    engine.requests.append(body)
    if engine.refusals:
        return engine.refusals.pop(0)
    if body["token_ids"][0] in engine.poison:
        return JSONResponse({"error": "the kernel failed"}, status_code=500)
    if not body["stream"]:
        ids: Sequence[int] = body["token_ids"]
        await engine.scores.wait()
        logprob = engine.logprob(body.get("model"))
        rows = [{str(token): {"logprob": logprob}} for token in ids[1:]]
        return JSONResponse({"prompt_logprobs": [None, *rows]})

    async def events() -> AsyncIterator[str]:
        for line in engine.malformed:
            yield f"data: {line}\n\n"
        async for event in engine.tokens(body["sampling_params"]["max_tokens"], body.get("model")):
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _ok(request: Request) -> Response:
    return Response()


def application(engine: FakeEngine) -> Starlette:
    """Returns the application that vLLM would serve with ``--middleware``."""
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", _generate, methods=["POST"]),
            Route("/health", _ok),
            Route("/metrics", _ok),
        ]
    )
    app.state.engine_client = engine
    app.state.args = SimpleNamespace(api_key=[TOKEN], enable_scale_out=True)
    app.add_middleware(FleetMember)
    return app


class FakeServer:
    """Server on its own port that can be restarted with a new engine."""

    def __init__(self) -> None:
        # No outgoing connection takes the port while the server is down.
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.engine = FakeEngine()
        self.app: Starlette | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def application(self) -> Starlette:
        """Returns the application of a new process."""
        self.engine = FakeEngine()
        return application(self.engine)

    async def start(self) -> None:
        """Starts a process's worth of a server: a new engine, without weights and sessions."""
        self.app = self.application()
        config = uvicorn.Config(
            self._answer, interface="asgi3", log_level="critical", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self.port))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 -- uvicorn sets no event
            await asyncio.sleep(0.005)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)

    def replace(self) -> None:
        """Replaces the process at once, as a supervisor that holds the port does."""
        self.reset_connections()
        self.app = self.application()

    def reset_connections(self) -> None:
        """Resets all connections, as a proxy that restarts does."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        """Ends the server with its connections."""
        assert self._server is not None and self._serving is not None
        self.reset_connections()
        self._server.force_exit = self._server.should_exit = True
        await self._serving

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def close(self) -> None:
        if self._serving is not None and not self._serving.done():
            await self.stop()


@asynccontextmanager
async def serving(number: int = 1) -> AsyncIterator[list[FakeServer]]:
    """Yields started servers."""
    servers = [FakeServer() for _ in range(number)]
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await server.close()


@asynccontextmanager
async def attached(server: FakeServer, owner: str = "run/rollout-0") -> AsyncIterator[VllmServer]:
    """Yields a client that has attached to a server."""
    client = VllmServer(server.address, owner=owner, reach=LOCAL, token=TOKEN)
    await client.attach()
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def router(
    servers: Sequence[str], path: str = "/workers", *, passes_on: bool = False
) -> AsyncIterator[tuple[str, list[str]]]:
    """Yields the address of a router, and the list of servers that it shows; it answers 503 without any."""
    listed = [*servers]

    async def show(request: Request) -> Response:
        if not listed:
            return JSONResponse({"error": "no server is ready"}, status_code=503)
        workers = [{"url": url, "worker_type": "regular"} for url in listed]
        return JSONResponse({"workers": workers} if path == "/workers" else {"urls": listed})

    async def pass_on(request: Request) -> Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            url = f"{listed[0]}{request.url.path}"
            content = await request.body()
            answer = await client.request(request.method, url, content=content, headers=headers)
        return Response(answer.content, answer.status_code)

    routes = [Route(path, show)]
    if passes_on:
        routes.append(Route("/{rest:path}", pass_on, methods=["GET", "POST", "PUT", "DELETE"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{port}", listed
        finally:
            server.force_exit = server.should_exit = True
            await running


def engine_config(servers: list[FakeServer], events: list[str], **changes: Any) -> EngineConfig:

    def report(kind: str, message: str) -> None:
        assert kind in WORKER_EVENTS, kind
        events.append(f"{kind}: {message}")

    values: dict[str, Any] = {
        "config": Qwen2Config(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=512,
        ),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_running": 8,
        "arguments": {"addresses": [server.address for server in servers], "token": TOKEN},
        "reach": LOCAL,
        "worker": "run/rollout-0",
        "report": report,
    }
    return EngineConfig(**(values | changes))


@asynccontextmanager
async def attached_engine(
    servers: list[FakeServer], events: list[str], *, number: int | None = None
) -> AsyncIterator[FleetEngine]:
    num_servers = len(servers) if number is None else number
    engine = build(engine_config(servers, events))
    async with running(engine), asyncio.timeout(120):
        await until(lambda: len(engine.backend.fleet.attached) == num_servers, poll_s=0.005)
        yield engine
