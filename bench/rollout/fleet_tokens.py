"""Tokens that one rollout process takes from an attached vLLM server, and the processor time of both sides.

Usage: python -m bench.rollout.fleet_tokens [--running 256] [--tokens 400] [--steps-per-s 80] [--json FILE]

A separate process serves with the fleet's middleware and, in the place of vLLM's engine, with one that
samples a token for each running request in each step, and sends the tokens of sixteen steps together. The
engine ``vllm-server`` in this process runs requests against it, one after the other in each slot, with an
update of the weights every ``--update-s``. Bar: 20,000 tokens/s in one rollout process.

Then all slots begin at once, several times, with the same prompts in each group of eight, as they do when a
version lets the next batch of a run begin. ``at_once`` has the processor time of both sides for each request
with two batches of tokens; meanwhile neither side answers a weight sync.
"""

import argparse
import asyncio
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
import uvicorn
from starlette.applications import Starlette
from transformers import Qwen2Config

from bench.report import report_to
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.protocol import SCHEDULER
from services.extras.fleets.server import FleetMember
from services.extras.fleets.vllm_server import build
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.engine_config import EngineConfig

RESULTS = Path(__file__).parents[1] / "results" / "fleet-tokens.json"
_TOKEN = "the-servers-token"
_CONTEXT, _VOCABULARY, _BATCH = 300, 50_000, 16
_LEAST_TOKENS = 20_000
_START_S = 180.0
_BURSTS, _BETWEEN_S = 7, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256, help="running requests")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a response")
    parser.add_argument("--steps-per-s", type=float, default=80.0, help="most steps of the engine")
    parser.add_argument("--update-s", type=float, default=4.0, help="seconds between two versions")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(arguments.serve, arguments.steps_per_s, arguments.running)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "bench.rollout.fleet_tokens", "--serve", str(port)),
        *("--steps-per-s", str(arguments.steps_per_s), "--running", str(arguments.running)),
    ]
    server = subprocess.Popen(command)
    try:
        result = asyncio.run(_measure(port, psutil.Process(server.pid), arguments))
    finally:
        server.kill()
        server.wait()
    report_to(arguments.json, result)


async def _measure(
    port: int, server: psutil.Process, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns tokens/s, and the processor time of both processes."""
    engine = build(
        EngineConfig(
            config=_model(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_running=arguments.running,
            arguments={"addresses": [f"http://127.0.0.1:{port}"], "token": _TOKEN},
            reach=AddressPolicy(("127.0.0.1",)),
            worker="bench/rollout-0",
            report=lambda kind, message: print(kind, message, file=sys.stderr, flush=True),
        )
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(engine.run())
        async with asyncio.timeout(_START_S):
            await engine.wait_ready()
        await _adopt(engine, 0)
        slots = [
            group.create_task(_fill(engine, slot, arguments.tokens))
            for slot in range(arguments.running)
        ]
        await asyncio.sleep(2.0)  # the first responses have begun
        result = await _count(engine, server, arguments)
        for task in slots:
            task.cancel()
        await asyncio.wait(slots)
        result["at_once"] = await _begin_at_once(engine, server, arguments.running)
        serving.cancel()
    return result


async def _begin_at_once(
    engine: FleetEngine, server: psutil.Process, num_running: int
) -> dict[str, float]:
    """Returns medians over bursts of requests in all slots."""
    rollout_ms, server_ms = [], []
    for burst in range(_BURSTS):
        requests = [
            GenerationRequest(
                request_id=f"b{burst}.{slot}",
                context_ids=tuple(
                    (slot // 8 * 7 + burst + i) % _VOCABULARY for i in range(_CONTEXT)
                ),
                max_tokens=_BATCH + _BATCH // 2,
                seed=slot,
            )
            for slot in range(num_running)
        ]
        cpu, server_cpu = time.process_time(), sum(server.cpu_times()[:2])
        await asyncio.gather(*[engine.generate(request) for request in requests])
        rollout_ms.append(1e3 * (time.process_time() - cpu) / num_running)
        server_ms.append(1e3 * (sum(server.cpu_times()[:2]) - server_cpu) / num_running)
        await asyncio.sleep(_BETWEEN_S)
    return {
        "rollout_ms_per_request": round(median(rollout_ms), 3),
        "server_ms_per_request": round(median(server_ms), 3),
    }


async def _count(
    engine: FleetEngine, server: psutil.Process, arguments: argparse.Namespace
) -> dict[str, Any]:
    began, cpu, server_cpu = time.perf_counter(), time.process_time(), sum(server.cpu_times()[:2])
    num_tokens, adoptions = engine.stats().tokens_total, []
    for version in itertools.count(1):
        await asyncio.sleep(arguments.update_s)
        if time.perf_counter() - began > arguments.seconds:
            break
        at = time.perf_counter()
        await _adopt(engine, version)
        adoptions.append(1e3 * (time.perf_counter() - at))
    seconds = time.perf_counter() - began
    cpu, server_cpu = time.process_time() - cpu, sum(server.cpu_times()[:2]) - server_cpu
    num_tokens = engine.stats().tokens_total - num_tokens
    capacity = num_tokens / cpu
    return {
        "running": arguments.running,
        "tokens_per_response": arguments.tokens,
        "tokens_per_s": round(num_tokens / seconds),
        "rollout_us_per_token": round(1e6 * cpu / num_tokens, 1),
        "rollout_busy": round(cpu / seconds, 3),
        "server_us_per_token": round(1e6 * server_cpu / num_tokens, 1),
        "server_busy": round(server_cpu / seconds, 3),
        "adopt_ms": [round(value, 1) for value in adoptions],
        "tokens_per_s_of_a_whole_core": round(capacity),
        f"at least {_LEAST_TOKENS}": capacity >= _LEAST_TOKENS,
    }


async def _fill(engine: FleetEngine, slot: int, num_tokens: int) -> None:
    """Keeps one slot busy; the first response is shorter, so that the slots do not end together."""
    for number in itertools.count():
        length = num_tokens if number else 1 + slot * num_tokens // 256 % num_tokens
        context = tuple((slot * 7 + number * 3 + i) % _VOCABULARY for i in range(_CONTEXT))
        await engine.generate(
            GenerationRequest(
                request_id=f"r{slot}.{number}", context_ids=context, max_tokens=length, seed=slot
            )
        )


async def _adopt(engine: FleetEngine, version: int) -> None:
    tensors = {spec.name: torch.zeros(spec.shape) for spec in engine.weight_specs()}
    await engine.adopt_weights(version, tensors)


def _model() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )


class _Engine:
    """Stands for vLLM's ``AsyncLLM``, with the parts that the middleware uses."""

    make_parameters = SimpleNamespace

    def __init__(self, steps_per_s: float, max_running: int) -> None:
        self._step_s = 1.0 / steps_per_s
        self._token_counts: dict[str, list[int]] = {}
        """Tokens that were not sent yet, and those that are left, by request."""
        self._is_paused, self._era = False, 0
        self.engine_core = self.input_processor = self.output_processor = self
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=2048,
                dtype=torch.float32,
                head_dtype=torch.float32,
                logprobs_mode="processed_logprobs",
                hf_text_config=SimpleNamespace(
                    vocab_size=_VOCABULARY, num_hidden_layers=1, hidden_size=8
                ),
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=100_000, block_size=16),
            parallel_config=SimpleNamespace(data_parallel_size=1, _api_process_count=1),
            scheduler_config=SimpleNamespace(max_num_seqs=max_running, scheduler_cls=SCHEDULER),
            lora_config=None,
        )

    async def run(self) -> None:
        """Samples a token for each request in each step."""
        while True:
            began = time.perf_counter()
            if not self._is_paused:
                self.process_outputs(self._step())
            await asyncio.sleep(max(self._step_s - (time.perf_counter() - began), 0.0))

    def _step(self) -> list[Any]:
        ready = []
        for name, counts in [*self._token_counts.items()]:
            counts[0] += 1
            counts[1] -= 1
            if counts[0] == _BATCH or not counts[1]:
                ready.append(self._output(name, counts[0], "length" if not counts[1] else None))
                counts[0] = 0
                if not counts[1]:
                    del self._token_counts[name]
        return ready

    def _output(self, name: str, number: int, reason: str | None) -> Any:
        return SimpleNamespace(
            request_id=name,
            new_token_ids=[12_345] * number,
            new_logprobs=SimpleNamespace(
                logprob_token_ids=np.array([(self._era, 0)], np.int32),
                logprobs=np.full(number, -1.234567, np.float32),
            ),
            prefill_stats=None,
            finish_reason=reason,
        )

    def process_inputs(self, name: str, prompt: Any, parameters: Any, tasks: Sequence[str]) -> Any:
        return SimpleNamespace(request_id=name, max_tokens=parameters.max_tokens)

    def process_outputs(self, outputs: Any) -> Any:
        return outputs

    def propagate_error(self, error: Exception) -> None:
        raise error

    async def add_request_async(self, request: Any) -> None:
        self._token_counts[request.request_id] = [0, request.max_tokens]

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        for name in names:
            self._token_counts.pop(name, None)

    async def pause_scheduler_async(self, **options: Any) -> None:
        self._is_paused = True

    async def reset_prefix_cache_async(self, **options: Any) -> bool:
        return True

    async def resume_scheduler_async(self) -> None:
        self._era += self._is_paused
        self._is_paused = False

    async def collective_rpc(self, method: str, args: Any) -> list[dict[str, Any]]:
        return [{"way": "compared", "differing": []}]


def _serve(port: int, steps_per_s: float, max_running: int) -> None:
    """Serves until the process is killed."""

    async def serve() -> None:
        engine = _Engine(steps_per_s, max_running)
        app = Starlette()
        app.state.engine_client = engine
        app.state.args = SimpleNamespace(api_key=[_TOKEN], enable_scale_out=True)
        app.add_middleware(FleetMember)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            await server.serve()

    try:
        import uvloop  # as vLLM's server
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())


if __name__ == "__main__":
    main()
