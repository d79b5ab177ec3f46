"""A server with SGLang's interface around an engine whose logprobs show its weights."""

import asyncio
import base64
import json
import pickle
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.unit.extras.fleets.servers import FakeServer

ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "enable_fp32_lm_head": True,
    "enable_deterministic_inference": False,
    "dp_size": 1,
    "pp_size": 1,
    "tp_size": 1,
    "ep_size": 1,
    "tokenizer_worker_num": 1,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "quantization": None,
    "max_total_num_tokens": 4096,
    "max_req_input_len": 512,
    "incremental_streaming_output": True,
    "random_seed": 3,
    "version": "0.5.21",
    "device": "cuda",
}


class SglangEngine:
    """Samples token 7, or those of ``script``, with a logprob of the first weight."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.answers: dict[str, Any] = {**ENGINE}
        self.label = "default"
        self.bias = 0.0
        self.checksum: Callable[[], str] = lambda: str(self.bias)
        self.script: list[int] = []
        """Next tokens; a token 15 ends a response, as the server's configuration says."""
        self.is_paused = self.is_updating = self.is_ending = False
        self.is_slow = False
        """True if the engine does not answer the health check in time."""
        self.num_pauses = 0
        self.ends: list[dict[str, Any]] = []
        """Reasons with which the next responses end before their first token."""
        self.failing: set[str] = set()
        """Paths that answer 400."""
        self.blocked_paths: dict[str, asyncio.Event] = {}
        """Paths that answer once their event is set."""
        self.calls: list[str] = []
        self.labels: list[str] = []

    async def control(self, request: Request) -> Response:
        path, content = request.url.path, await request.body()
        body = json.loads(content) if content else {}
        self.calls.append(path)
        if path in self.failing or (path == "/begin_weight_update" and self.is_updating):
            message = "a weight-update session is already open" if self.is_updating else "failed"
            return JSONResponse({"success": False, "message": message}, status_code=400)
        if path in self.blocked_paths:
            await self.blocked_paths[path].wait()
        match path:
            case "/update_weight_version":
                self.label = body["new_version"]
                self.labels.append(self.label)
            case "/pause_generation":
                self.is_paused = True
                self.num_pauses += 1
            case "/continue_generation":
                self.is_paused = False
            case "/begin_weight_update" | "/end_weight_update":
                self.is_updating = path == "/begin_weight_update"
            case "/update_weights_from_tensor":
                assert self.is_paused and self.is_updating and ":loading:" in self.label
                (payload,) = body["serialized_named_tensors"]
                ((_, tensor), *_) = pickle.loads(base64.b64decode(payload))
                self.bias = float(tensor.flatten()[0])
            case "/weights_checker":
                return JSONResponse({"success": True, "per_engine_checksum": self.checksum()})
        return JSONResponse({"success": True, "message": "ok"})

    async def model_info(self, request: Request) -> Response:
        content = {"weight_version": self.label, "architectures": None, "model_type": "qwen2"}
        return JSONResponse(content)

    async def ready(self, request: Request) -> Response:
        is_ready = not (self.is_paused or self.is_ending or self.is_slow)
        return Response(status_code=200 if is_ready else 503)

    async def health(self, request: Request) -> Response:
        if self.is_slow:
            await asyncio.sleep(1)  # longer than its client waits
        return Response(status_code=503 if self.is_ending or self.is_slow else 200)

    async def server_info(self, request: Request) -> Response:
        return JSONResponse({**self.answers, "startup_time": {"total": self.started_at}})

    def _info(
        self, tokens: list[int], number: int, finish: object, bias: float | None = None
    ) -> dict[str, Any]:
        logprob = -(self.bias if bias is None else bias)
        return {
            "weight_version": self.label,
            "finish_reason": finish,
            "completion_tokens": number,
            "cached_tokens": 0,
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
        }

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            info = self._info([7], 1, {"type": "length"})
            info["input_token_logprobs"] = [
                [-self.bias, token, None] for token in body["input_ids"]
            ]
            return JSONResponse({"meta_info": info})
        most = body["sampling_params"]["max_new_tokens"]

        async def events() -> AsyncIterator[str]:
            while self.is_paused:  # noqa: ASYNC110 -- as short as the tokens
                await asyncio.sleep(0.001)
            if self.ends:
                yield f"data: {json.dumps({'meta_info': self._info([], 0, self.ends.pop(0))})}\n\n"
                yield "data: [DONE]\n\n"
                return
            num_pauses = self.num_pauses
            for number in range(1, most + 1):
                # As in SGLang, the label is read after the token was sampled.
                bias = self.bias
                await asyncio.sleep(0.001)
                if num_pauses != self.num_pauses:
                    info = self._info([], number - 1, {"type": "abort"})
                    yield f"data: {json.dumps({'meta_info': info})}\n\n"
                    break
                token = self.script.pop(0) if self.script else 7
                finish = {"type": "length"} if number == most else None
                if token == 15:
                    finish = {"type": "stop", "matched": token}
                info = self._info([token], number, finish, bias)
                yield f"data: {json.dumps({'meta_info': info})}\n\n"
                if finish:
                    break
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


_CONTROL = (
    "/update_weight_version",
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/weights_checker",
    "/flush_cache",
)


class SglangFake(FakeServer):
    """SGLang's server on its own port that can be restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.sglang = SglangEngine()

    def application(self) -> Starlette:
        self.sglang = engine = SglangEngine()
        return Starlette(
            routes=[
                *[Route(path, engine.control, methods=["POST"]) for path in _CONTROL],
                Route("/model_info", engine.model_info),
                Route("/server_info", engine.server_info),
                Route("/ready", engine.ready),
                Route("/health", engine.health),
                Route("/generate", engine.generate, methods=["POST"]),
            ]
        )
