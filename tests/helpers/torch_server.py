"""Server of a fleet with Slipstream's own engine in the place of vLLM.

``python -m tests.helpers.torch_server PORT SPECIFICATION TOKEN [ADDRESS]`` serves on loopback unless an
address is given.

It speaks vLLM's interface of token ids, as far as a fleet uses it, so that runs that attach to servers are
tested where vLLM is not installed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.common.task_group import TaskGroup
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.direct.member import ServerMember
from services.extras.fleets.direct.messages import JOIN_METHOD, LOAD_METHOD
from services.extras.fleets.protocol import SCHEDULER
from services.extras.fleets.server import FleetMember
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine

_BATCH = 8
"""Tokens that a request's line has, but for the last one."""


class EngineClient:
    """The part of vLLM's client that the middleware uses.

    Args:
        engine: The engine, which runs in the same event loop.
    """

    make_parameters = SimpleNamespace

    def __init__(self, engine: TorchEngine, config: Any) -> None:
        self.engine = engine
        self.engine_core = self.input_processor = self.output_processor = self
        self._num_loaded = self._num_asked = 0
        self._num_resumed = 0
        self._era_of: dict[int, int] = {}
        """Number of pauses before the tokens of each of the engine's versions."""
        self._decoding: dict[str, asyncio.Future[None]] = {}
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
            scheduler_config=SimpleNamespace(max_num_seqs=16, scheduler_cls=SCHEDULER),
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

    def process_inputs(
        self, name: str, prompt: dict[str, Any], parameters: Any, tasks: Sequence[str]
    ) -> GenerationRequest:
        body = {"token_ids": prompt["prompt_token_ids"], "sampling_params": vars(parameters)}
        return self.request(body, request_id=name)

    def process_outputs(self, outputs: Sequence[Any]) -> None:
        """Is replaced by the middleware."""

    def propagate_error(self, error: Exception) -> None:
        """Does nothing: a failure of the engine ends the process."""

    async def add_request_async(self, request: GenerationRequest) -> None:
        name = request.request_id
        decoding = self._decoding[name] = asyncio.ensure_future(self._decode(request))
        decoding.add_done_callback(lambda _: self._decoding.pop(name, None))

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        await self.engine.abort(set(names))

    async def pause_scheduler_async(self, **options: Any) -> None:
        await self.engine.pause()

    async def reset_prefix_cache_async(self, **options: bool) -> bool:
        return True  # an adoption computes the caches again

    async def resume_scheduler_async(self) -> None:
        self._num_resumed += 1
        self._era_of[self._num_loaded] = self._num_resumed
        await self.engine.resume()

    async def _decode(self, request: GenerationRequest) -> None:
        """Sends the tokens of a request in batches, each with the version that sampled it."""
        num_sent = 0
        listened: list[tuple[int, float, int]] = []

        def send(batch: Sequence[tuple[int, float, int]], reason: str | None = None) -> None:
            eras: list[tuple[int, int]] = []
            for index, (_, _, version) in enumerate(batch):
                if not eras or eras[-1][0] != self._era_of[version]:
                    eras.append((self._era_of[version], index))
            logprobs = SimpleNamespace(
                logprob_token_ids=np.array(eras, np.int32).reshape(-1, 2),
                logprobs=np.array([logprob for _, logprob, _ in batch], np.float32),
            )
            output = SimpleNamespace(
                request_id=request.request_id,
                new_token_ids=[token for token, _, _ in batch],
                new_logprobs=logprobs,
                prefill_stats=None,
                finish_reason=reason,
            )
            self.output_processor.process_outputs([output])

        def listen(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal num_sent
            version = self.engine.stats().weight_version
            listened.extend((t, p, version) for t, p in zip(token_ids, logprobs, strict=True))
            if len(listened) == _BATCH:
                send(listened)
                num_sent += len(listened)
                listened.clear()

        result = await self.engine.generate(replace(request, on_tokens=listen))
        versions = [v for version, count in result.version_runs for v in [version] * count]
        tokens = list(zip(result.token_ids, result.logprobs, versions, strict=True))
        send(
            tokens[num_sent:],
            "abort" if result.finish_reason == "aborted" else result.finish_reason,
        )

    def request(self, body: dict[str, Any], **changes: Any) -> GenerationRequest:
        """Converts vLLM's request."""
        self._num_asked += 1
        parameters = body["sampling_params"]
        return GenerationRequest(
            context_ids=tuple(body["token_ids"]),
            max_tokens=parameters["max_tokens"],
            seed=parameters.get("seed", self._num_asked),
            temperature=parameters["temperature"],
            stop_token_ids=frozenset(parameters["stop_token_ids"]),
            **{"request_id": str(self._num_asked), **changes},
        )


def _joined(middleware: dict[str, str]) -> ServerMember:
    secret = bytes.fromhex(middleware["secret"])
    return ServerMember(middleware["address"], secret, number=0, device=torch.device("cpu"))


def _received(member: ServerMember | None, version: int, digest: str) -> dict[str, Tensor]:
    assert member is not None, "the worker has joined a weight group"
    with member.held(version, digest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


async def _score(request: Request) -> Response:
    client: EngineClient = request.app.state.engine_client
    ids = (await request.json())["token_ids"]
    scores = await client.engine.score(ids)
    rows = [{str(token): {"logprob": score}} for token, score in zip(ids[1:], scores, strict=True)]
    return JSONResponse({"prompt_logprobs": [None, *rows]})


async def _health(request: Request) -> Response:
    return Response()


def main() -> None:
    """Serves a specification's model with random weights until it is killed."""
    port, path, token = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    address = sys.argv[4] if len(sys.argv) > 4 else "127.0.0.1"
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
        Route("/inference/v1/generate", _score, methods=["POST"]),
        Route("/health", _health),
    ]
    app = Starlette(routes=routes, lifespan=running)
    app.state.engine_client = EngineClient(engine, config)
    app.state.args = SimpleNamespace(api_key=[token], enable_scale_out=True)
    app.add_middleware(FleetMember)
    uvicorn.run(app, host=address, port=port, log_level="warning")


if __name__ == "__main__":
    main()
