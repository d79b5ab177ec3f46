"""Server of a fleet with Slipstream's own engine in the place of vLLM: ``python -m ... PORT SPECIFICATION``.

It speaks vLLM's interface of token ids, as far as a fleet uses it, so that runs that attach to servers are
tested where vLLM is not installed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.common.task_group import TaskGroup
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.direct.member import ServerMember
from services.extras.fleets.direct.messages import JOIN_METHOD, LOAD_METHOD
from services.extras.fleets.server import FleetMember
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine


class EngineClient:
    """The part of vLLM's client that the middleware uses.

    Args:
        engine: The engine, which runs in the same event loop.
    """

    def __init__(self, engine: TorchEngine, config: Any) -> None:
        self.engine = engine
        self._num_loaded = self._num_asked = 0
        self._member: ServerMember | None = None
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=config.max_position_embeddings,
                dtype=torch.float32,
                head_dtype=torch.float32,
                logprobs_mode="processed_logprobs",
                hf_text_config=config,
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=1024, block_size=16),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            lora_config=None,
        )

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        if method == JOIN_METHOD:
            self._member = await asyncio.to_thread(_joined, json.loads(args[0]))
            return [{"number": 0, "device": self._member.device_name}]
        if method == LOAD_METHOD:
            tensors = await asyncio.to_thread(_received, self._member, *json.loads(args[0]))
        else:
            assert method == "load_fleet_weights"
            tensors = open_shared(args[0])
        self._num_loaded += 1
        await self.engine.adopt_weights(self._num_loaded, tensors)
        return [{"way": "compared", "differing": []}]

    def request(self, body: dict[str, Any], **changes: Any) -> GenerationRequest:
        """Converts vLLM's request."""
        self._num_asked += 1
        parameters = body["sampling_params"]
        return GenerationRequest(
            request_id=str(self._num_asked),
            context_ids=tuple(body["token_ids"]),
            max_tokens=parameters["max_tokens"],
            seed=parameters.get("seed", self._num_asked),
            temperature=parameters["temperature"],
            stop_token_ids=frozenset(parameters["stop_token_ids"]),
            **changes,
        )


def _joined(middleware: dict[str, str]) -> ServerMember:
    secret = bytes.fromhex(middleware["secret"])
    return ServerMember(middleware["path"], secret, number=0, device=torch.device("cpu"))


def _received(member: ServerMember | None, version: int, digest: str) -> dict[str, Tensor]:
    assert member is not None, "the worker has joined a weight group"
    with member.held(version, digest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


async def _generate(request: Request) -> Response:
    client: EngineClient = request.app.state.engine_client
    body = await request.json()
    if not body["stream"]:
        ids = body["token_ids"]
        scores = await client.engine.score(ids)
        rows = [
            {str(token): {"logprob": score}} for token, score in zip(ids[1:], scores, strict=True)
        ]
        return JSONResponse({"prompt_logprobs": [None, *rows]})
    return StreamingResponse(_events(client, body), media_type="text/event-stream")


async def _events(client: EngineClient, body: dict[str, Any]) -> AsyncIterator[str]:
    """Yields tokens as they come; as in vLLM, the last ones come with the reason of the end."""
    chunks: asyncio.Queue[int] = asyncio.Queue()
    tokens: list[tuple[int, float]] = []

    def listen(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        tokens.extend(zip(token_ids, logprobs, strict=True))
        chunks.put_nowait(len(tokens) - len(token_ids))

    request = client.request(body, on_tokens=listen)
    task = asyncio.ensure_future(client.engine.generate(request))
    task.add_done_callback(lambda _: chunks.put_nowait(-1))
    num_sent = 0
    try:
        while (num_earlier := await chunks.get()) >= 0:
            if num_earlier > num_sent:
                yield _event(tokens[num_sent:num_earlier])
                num_sent = num_earlier
        result = task.result()
        rest = list(zip(result.token_ids, result.logprobs, strict=True))[num_sent:]
        yield _event(rest, result.finish_reason)
        yield "data: [DONE]\n\n"
    finally:
        if not task.done():
            await client.engine.abort({request.request_id})


def _event(tokens: Sequence[tuple[int, float]], reason: str | None = None) -> str:
    choice = {
        "token_ids": [token for token, _ in tokens],
        "logprobs": {"content": [{"token_id": t, "logprob": logprob} for t, logprob in tokens]},
        "finish_reason": reason,
    }
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


async def _health(request: Request) -> Response:
    return Response()


def main() -> None:
    """Serves a specification's model with random weights until it is killed."""
    port, path, token = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    spec = load_spec(path)
    config = load_config(spec.model, load_tokenizer(spec.model))
    engine = TorchEngine(build_model(config, dtype=torch.float32, device="cpu"), max_running=16)

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        async with TaskGroup() as tasks:
            serving = tasks.create_task(engine.run())
            yield
            serving.cancel()

    routes = [
        Route("/inference/v1/generate", _generate, methods=["POST"]),
        Route("/health", _health),
    ]
    app = Starlette(routes=routes, lifespan=running)
    app.state.engine_client = EngineClient(engine, config)
    app.state.args = SimpleNamespace(api_key=[token], enable_scale_out=True)
    app.add_middleware(FleetMember)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
