"""Measures four runs with LoRA adapters that share one of vLLM's servers on the CPU.

Usage: PYTHON -m bench.rollout.fleet_shares [--rounds 3] [--seconds 15] [--out FILE.json]

``PYTHON`` is that of an environment with vLLM's CPU build; see ``tests/engines/run.sh``. Rounds alternate
between the loads, so that a busy host slows all of them down.

Bars: four runs sample >= 0.9 of the tokens/s of one run with as many requests; tokens within 10 % of the
shares; a flood delays the responses of the others by <= 20 %.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.report import report_to
from services.common.task_group import TaskGroup
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import LocalServer, LocalVllm, engine_arguments, local_servers
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.weightsync.adapters import FROZEN_DIGEST, frozen_digest
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP

_SLOTS = 16
_RUNS = 4
_RANK = 8
_CONTEXT = 24
_LENGTHS = (24, 72)
_FLOOD = 10
"""Times the requests of a run that floods."""
_SHARES = (1.0, 1.0, 2.0, 4.0)
_SUM, _TOLERANCE, _DELAY = 0.9, 0.1, 1.2
_VOCAB = 512


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )


def _adapters(model: Qwen2ForCausalLM, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if name.endswith("_proj.weight"):
            owner, (rows, columns) = name.removesuffix(".weight"), value.shape
            tensors[owner + LORA_DOWN] = torch.randn(_RANK, columns, generator=generator) / 16
            tensors[owner + LORA_UP] = torch.randn(rows, _RANK, generator=generator) / 16
    return {**tensors, FROZEN_DIGEST: frozen_digest(model.named_parameters())}


@dataclass
class Load:
    """Requests that one run keeps at the server."""

    engine: FleetEngine
    concurrency: int
    seconds: list[float] = field(default_factory=list)
    """Time of each response per token."""
    _first_token: int = 0

    async def keep(self, draws: random.Random) -> None:
        """Sends requests until it is cancelled."""
        async with TaskGroup() as tasks:
            for index in range(self.concurrency):
                tasks.create_task(self._send(index, random.Random(draws.random())))

    async def _send(self, index: int, draws: random.Random) -> None:
        number = 0
        while True:
            request = GenerationRequest(
                request_id=f"{index}.{number}",
                context_ids=tuple(draws.randrange(2, _VOCAB) for _ in range(_CONTEXT)),
                max_tokens=draws.randint(*_LENGTHS),
                seed=number,
            )
            started_at, number = time.monotonic(), number + 1
            result = await self.engine.generate(request)
            self.seconds.append((time.monotonic() - started_at) / len(result.token_ids))

    def begin(self) -> None:
        """Begins the measurement."""
        self.seconds.clear()
        self._first_token = self.engine.stats().tokens_total

    @property
    def num_tokens(self) -> int:
        return self.engine.stats().tokens_total - self._first_token


@asynccontextmanager
async def _attached(
    server: LocalServer, run: str, share: float, sent: Mapping[str, Tensor], running: int
) -> AsyncIterator[FleetEngine]:
    config = EngineConfig(
        config=_config(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=running,
        adds_adapters=True,
        arguments={**engine_arguments([server]), "share": share, "max_model_len": 256},
        reach=AddressPolicy(("127.0.0.1",)),
        worker=f"{run}/rollout-0",
    )
    engine = make_engine("vllm-server", config)
    assert isinstance(engine, FleetEngine)
    async with TaskGroup() as tasks:
        serving = tasks.create_task(engine.run())
        await engine.wait_ready()
        await engine.adopt_weights(0, sent)
        yield engine
        serving.cancel()


async def measure(
    server: LocalServer,
    sent: Sequence[Mapping[str, Tensor]],
    loads: Sequence[tuple[float, int]],
    *,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Measures runs with given shares and numbers of requests at once."""
    async with AsyncExitStack() as stack:
        started = []
        for number, (share, concurrency) in enumerate(loads):
            attached = _attached(server, f"run{number}", share, sent[number], concurrency)
            started.append(Load(await stack.enter_async_context(attached), concurrency))
        async with TaskGroup() as tasks:
            draws = random.Random(seed)
            keeping = [tasks.create_task(load.keep(draws)) for load in started]
            await asyncio.sleep(seconds / 3)
            for load in started:
                load.begin()
            began_at = time.monotonic()
            await asyncio.sleep(seconds)
            took_s = time.monotonic() - began_at
            tokens = [load.num_tokens for load in started]
            token_s = [statistics.fmean(load.seconds or [took_s]) for load in started]
            for task in keeping:
                task.cancel()
    return {
        "tokens_s": [round(number / took_s, 1) for number in tokens],
        "token_s": [round(value, 4) for value in token_s],
    }


def _alternate(
    server: LocalServer, sent: Sequence[Mapping[str, Tensor]], *, rounds: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    each = _SLOTS // _RUNS
    loads = {
        "one": [(1.0, _SLOTS)],
        "four": [(1.0, each)] * _RUNS,
        "shares": [(share, _SLOTS) for share in _SHARES],
        "flood": [(1.0, _FLOOD * _SLOTS), *[(1.0, each)] * (_RUNS - 1)],
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
    for number in range(rounds):
        for name, load in loads.items():
            result = asyncio.run(measure(server, sent, load, seconds=seconds, seed=number))
            results[name].append(result)
            print(name, result, flush=True)
    return results


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Compares the loads; each ratio is a median over rounds."""
    sums = {name: [sum(row["tokens_s"]) for row in rows] for name, rows in results.items()}
    ratio = statistics.median(
        four / one for four, one in zip(sums["four"], sums["one"], strict=True)
    )
    of_shares = [
        statistics.median(row["tokens_s"][run] / sum(row["tokens_s"]) for row in results["shares"])
        / (share / sum(_SHARES))
        for run, share in enumerate(_SHARES)
    ]
    delays = [
        statistics.median(
            flooded["token_s"][run] / calm["token_s"][run]
            for flooded, calm in zip(results["flood"], results["four"], strict=True)
        )
        for run in range(1, _RUNS)
    ]
    return {
        "sum_against_one_run": round(ratio, 3),
        "tokens_against_share": [round(value, 3) for value in of_shares],
        "flood_delay": [round(value, 3) for value in delays],
        "meets_bars": ratio >= _SUM
        and all(abs(value - 1) <= _TOLERANCE for value in of_shares)
        and all(value <= _DELAY for value in delays),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench/results/fleet-shares.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(_config()).eval()
    sent = [_adapters(model, seed) for seed in range(_RUNS)]
    options = ("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "2048")
    limits = ("--max-num-seqs", str(_SLOTS), "--kv-cache-memory-bytes", str(64 << 20))
    adapters = ("--enable-lora", "--max-loras", str(_RUNS), "--max-lora-rank", str(_RANK))
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        with local_servers(LocalVllm, Path(name), 1, *options, *limits, *adapters) as (server,):
            results = _alternate(server, sent, rounds=arguments.rounds, seconds=arguments.seconds)
    report_to(
        arguments.out,
        {
            "host": f"{os.cpu_count()} CPU cores",
            "slots": _SLOTS,
            "runs": _RUNS,
            "shares": list(_SHARES),
            "seconds": arguments.seconds,
            **summary(results),
            "rounds": results,
        },
    )


if __name__ == "__main__":
    main()
