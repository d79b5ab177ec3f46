"""CPU time per token behind vLLM's adapter, with stand-ins for the output of vLLM's engine process.

Usage: ``python -m bench.rollout.token_cost [--running 1024] [--tokens 512] [--out FILE]`` where
vLLM is installed; a few seconds on one otherwise idle core.

The adapter is complete: engine, streams, and the scheduler's gatherer. Of vLLM it uses the output
objects and the codec, without an engine or a socket. Bar: ``ours``, which is everything except the
codec, <= 2 us per token.
"""

import argparse
import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from bench.report import report_to
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig

_INTERVAL = 16


class Core:
    """Replaces vLLM's client of its engine process: every request gets one token per step."""

    def __init__(self, num_tokens: int) -> None:
        from services.rollout.engines.vllm.scheduler import TokenBatcher

        self._num_tokens = num_tokens
        self._gatherer = TokenBatcher(_INTERVAL)
        self.requests: list[str] = []
        self.started = asyncio.Event()
        self.seconds = {"stand_in": 0.0, "gather": 0.0, "codec": 0.0}
        self._step = 0

    async def add_request_async(self, request: Any) -> None:
        """Accepts a request."""
        self.requests.append(request.request_id)

    async def get_output_async(self) -> Any:
        """Returns the engine's output of the next steps, encoded and decoded as on its socket."""
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        await self.started.wait()
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        while self._step < self._num_tokens:
            self._step += 1
            since = time.process_time()
            made = self._made()
            begin = time.process_time()
            self.seconds["stand_in"] += begin - since
            ready = self._gatherer.passed(made)
            gathered = time.process_time()
            self.seconds["gather"] += gathered - begin
            if ready:
                sent = decoder.decode(encoder.encode(EngineCoreOutputs(outputs=ready)))
                self.seconds["codec"] += time.process_time() - gathered
                await asyncio.sleep(0)
                return sent
        return await asyncio.get_running_loop().create_future()

    def _made(self) -> list[Any]:
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        count = len(self.requests)
        ids = np.full((count, 1), 7, dtype=np.int32)
        logprobs = np.full((count, 1), -1.5, dtype=np.float32)
        everything = LogprobsLists(ids, logprobs, np.zeros(count, dtype=np.int32))
        reason = FinishReason.LENGTH if self._step == self._num_tokens else None
        return [
            EngineCoreOutput(
                name, [7], new_logprobs=everything.slice_request(index, 1), finish_reason=reason
            )
            for index, name in enumerate(self.requests)
        ]


async def _deliver(backend: Any) -> None:
    while True:
        await backend._deliver()  # noqa: SLF001


async def measure(running: int, num_tokens: int) -> dict[str, float]:
    """Returns microseconds of CPU time per token, by part."""
    order = EngineConfig(
        config=Qwen2Config(
            vocab_size=258, num_hidden_layers=1, hidden_size=64, intermediate_size=64
        ),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=running,
    )
    engine: Any = make_engine("vllm", order)
    core = Core(num_tokens)
    processor = SimpleNamespace(process_inputs=lambda name, *rest: SimpleNamespace(request_id=name))
    backend = engine.backend
    backend._llm = SimpleNamespace(engine_core=core, input_processor=processor)  # noqa: SLF001
    engine._started.set()  # noqa: SLF001
    requests = [
        GenerationRequest(request_id=f"r{n}", context_ids=(5,) * 64, max_tokens=num_tokens, seed=n)
        for n in range(running)
    ]
    delivering = asyncio.ensure_future(_deliver(backend))
    results = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    while len(core.requests) < running:
        await asyncio.sleep(0)
    begin = time.process_time()
    core.started.set()
    done = await asyncio.gather(*results)
    whole = time.process_time() - begin - core.seconds.pop("stand_in")
    delivering.cancel()
    assert all(len(result.token_ids) == num_tokens for result in done)
    total = running * num_tokens
    parts = {name: round(1e6 * seconds / total, 2) for name, seconds in core.seconds.items()}
    return {
        **parts,
        "front": round(1e6 * (whole - sum(core.seconds.values())) / total, 2),
        "ours": round(1e6 * (whole - core.seconds["codec"]) / total, 2),
        "whole": round(1e6 * whole / total, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = asyncio.run(measure(options.running, options.tokens))
    report_to(
        options.out, {"running": options.running, "tokens": options.tokens, "us_per_token": found}
    )


if __name__ == "__main__":
    main()
