"""Measures four runs with LoRA adapters that share one of vLLM's servers on the CPU.

Usage: PYTHON -m bench.rollout.fleet_shares [--rounds 3] [--seconds 15] [--loads one four] [--out FILE.json]

``PYTHON`` is that of an environment with vLLM's CPU build; see ``tests/engines/run.sh``. Rounds alternate
between the loads, so that a busy host slows all of them down. Results of loads that are not measured stay in
an earlier file. The run that is deleted or killed is another process; the others are measured for 30 s
before and 30 s after, in which a killed run's session expires.

Bars: four runs sample >= 0.9 of the tokens/s of one run with as many requests; tokens within 10 % of the
shares; a flood, a deletion and a kill of one run delay the responses of the others by <= 20 %.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
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
_AROUND_S = 30.0
"""Seconds before the end of a run, and after it."""
_LOADS: Mapping[str, Sequence[tuple[float, int]]] = {
    "one": [(1.0, _SLOTS)],
    "four": [(1.0, _SLOTS // _RUNS)] * _RUNS,
    "shares": [(share, _SLOTS) for share in _SHARES],
    "flood": [(1.0, _FLOOD * _SLOTS), *[(1.0, _SLOTS // _RUNS)] * (_RUNS - 1)],
}
"""Share and requests at once of each run."""
_ENDS = ("deleted", "killed")
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


def base_model() -> Qwen2ForCausalLM:
    """Returns the model of the server."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(_config())


def adapters(seed: int) -> dict[str, Tensor]:
    """Returns the adapters of a run, and the digest of their base."""
    model = base_model()
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
    servers: Mapping[str, Any], run: str, share: float, weights: Mapping[str, Tensor], running: int
) -> AsyncIterator[FleetEngine]:
    config = EngineConfig(
        config=_config(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=running,
        adds_adapters=True,
        arguments={**servers, "share": share, "max_model_len": 256},
        reach=AddressPolicy(("127.0.0.1",)),
        worker=f"{run}/rollout-0",
    )
    engine = make_engine("vllm-server", config)
    assert isinstance(engine, FleetEngine)
    async with TaskGroup() as tasks:
        serving = tasks.create_task(engine.run())
        await engine.wait_ready()
        await engine.adopt_weights(0, weights)
        yield engine
        serving.cancel()


async def measure(
    servers: Mapping[str, Any],
    adapter_weights: Sequence[Mapping[str, Tensor]],
    loads: Sequence[tuple[float, int]],
    *,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Measures runs with given shares and numbers of requests at once."""
    async with AsyncExitStack() as stack:
        started = []
        for number, (share, concurrency) in enumerate(loads):
            attached = _attached(
                servers, f"run{number}", share, adapter_weights[number], concurrency
            )
            started.append(Load(await stack.enter_async_context(attached), concurrency))
        async with TaskGroup() as tasks:
            draws = random.Random(seed)
            keeping = [tasks.create_task(load.keep(draws)) for load in started]
            await asyncio.sleep(seconds / 3)
            result = await _window(started, seconds)
            for task in keeping:
                task.cancel()
    return result


async def _window(loads: Sequence[Load], seconds: float) -> dict[str, Any]:
    """Measures all loads for some seconds."""
    for load in loads:
        load.begin()
    began_at = time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_at
    return {
        "tokens_s": [round(load.num_tokens / took_s, 1) for load in loads],
        "token_s": [round(statistics.fmean(load.seconds or [took_s]), 4) for load in loads],
    }


async def measure_end(
    servers: Mapping[str, Any],
    adapter_weights: Sequence[Mapping[str, Tensor]],
    how: str,
    *,
    seed: int,
) -> dict[str, Any]:
    """Measures three runs before and after the fourth one, a process, is deleted or killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_until_stopped, args=(servers, theirs), daemon=True)
    process.start()
    try:
        async with AsyncExitStack() as stack, TaskGroup() as tasks:
            others = []
            for number in range(1, _RUNS):
                attached = _attached(
                    servers, f"run{number}", 1.0, adapter_weights[number], _SLOTS // _RUNS
                )
                others.append(Load(await stack.enter_async_context(attached), _SLOTS // _RUNS))
            draws = random.Random(seed)
            keeping = [tasks.create_task(load.keep(draws)) for load in others]
            await asyncio.to_thread(ours.recv)  # the run sends its requests now
            await asyncio.sleep(_AROUND_S / 3)
            before = await _window(others, _AROUND_S)
            if how == "killed":
                process.kill()
            else:
                ours.send("end")
            after = await _window(others, _AROUND_S)
            for task in keeping:
                task.cancel()
    finally:
        await asyncio.to_thread(process.join, _AROUND_S)
        process.kill()
    return {"before": before, "after": after}


def _run_until_stopped(servers: Mapping[str, Any], line: Connection) -> None:
    """Keeps a run's requests at the server until the other end of a pipe says otherwise."""

    async def keep() -> None:
        load = _SLOTS // _RUNS
        async with (
            _attached(servers, "run0", 1.0, adapters(0), load) as engine,
            TaskGroup() as tasks,
        ):
            keeping = tasks.create_task(Load(engine, load).keep(random.Random(0)))
            line.send("begun")
            await asyncio.to_thread(line.recv)
            keeping.cancel()

    asyncio.run(keep())


def _alternate(
    server: LocalServer, names: Sequence[str], *, rounds: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    servers, adapter_weights = engine_arguments([server]), [adapters(seed) for seed in range(_RUNS)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            measuring = (
                measure_end(servers, adapter_weights, name, seed=number)
                if name in _ENDS
                else measure(servers, adapter_weights, _LOADS[name], seconds=seconds, seed=number)
            )
            results[name].append(asyncio.run(measuring))
            print(name, results[name][-1], flush=True)
    return results


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Compares the loads; each ratio is a median over rounds."""
    sums = {name: [sum(row["tokens_s"]) for row in results[name]] for name in ("one", "four")}
    ratio = statistics.median(
        shared / alone for shared, alone in zip(sums["four"], sums["one"], strict=True)
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
    ends = {
        f"{how}_delay": [
            round(
                statistics.median(
                    row["after"]["token_s"][run] / row["before"]["token_s"][run]
                    for row in results[how]
                ),
                3,
            )
            for run in range(_RUNS - 1)
        ]
        for how in _ENDS
    }
    return {
        "sum_against_one_run": round(ratio, 3),
        "tokens_against_share": [round(value, 3) for value in of_shares],
        "flood_delay": [round(value, 3) for value in delays],
        **ends,
        "meets_bars": ratio >= _SUM
        and all(abs(value - 1) <= _TOLERANCE for value in of_shares)
        and all(value <= _DELAY for value in (*delays, *itertools.chain(*ends.values()))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    names = (*_LOADS, *_ENDS)
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("bench/results/fleet-shares.json"))
    arguments = parser.parse_args()
    options = ("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "2048")
    limits = ("--max-num-seqs", str(_SLOTS), "--kv-cache-memory-bytes", str(64 << 20))
    of_runs = ("--enable-lora", "--max-loras", str(_RUNS), "--max-lora-rank", str(_RANK))
    with tempfile.TemporaryDirectory() as name:
        base_model().save_pretrained(name)
        with local_servers(LocalVllm, Path(name), 1, *options, *limits, *of_runs) as (server,):
            measured = _alternate(
                server, arguments.loads, rounds=arguments.rounds, seconds=arguments.seconds
            )
    earlier = json.loads(arguments.out.read_text())["rounds"] if arguments.out.exists() else {}
    results = {**earlier, **measured}
    if missing := [name for name in names if name not in results]:
        sys.exit(f"{arguments.out} has no results of {', '.join(missing)}: measure these too")
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
