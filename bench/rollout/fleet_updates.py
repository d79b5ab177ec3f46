"""Replaces the weights of two servers again and again, while each is killed and started again at random.

Requests run all the time, and each of their tokens states the weight version that sampled it. Its logprob is
compared with that of a plain forward pass of that version's weights; versions differ by whole nats.

Usage: PYTHON -m bench.rollout.fleet_updates [--engine sglang-server] [--updates 200] [--drain] [--out FILE]

``PYTHON`` is that of an environment with the engine's CPU build; see ``tests/engines/run.sh``. The engine
``stand-in`` needs none: its servers are Slipstream's own engine with vLLM's interface, which start sooner.

Bars: no token under other weights than those of its version, and at least one kill for every 20 updates.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.engines import ENGINES
from services.common.runspec.loader import load_spec
from services.extras.fleets.client import FleetServer
from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import (
    TOKEN,
    LocalServer,
    LocalSglang,
    LocalVllm,
    engine_arguments,
    import_few_models,
    local_servers,
)
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig

_TOLERANCE = 1e-3
_DRAWING = threading.Lock()
_CONTEXT, _RESPONSE, _RUNNING, _GROUP = 40, 160, 6, 3
_ABORT_CHANCE, _ABORT_WITHIN_S = 0.2, 5.0
"""Chance of a group to lose a request, and the longest time until then."""
_MOST_TOKENS = 256
_TOKENS_PER_UPDATE = 60
_PAUSE_S = 0.5
_UPDATE_DEADLINE_S = 900.0
"""Longest update: both servers may start again meanwhile, which takes minutes on a busy host."""
_KILL_CHANCE, _KILL_WITHIN_S = 0.1, 3.0
"""Chance of a server that serves to be killed in an update, and the time after its begin."""
_DRAIN_DEADLINE_S = 240.0
_KILL_SHARE = 20
_STAND_IN_SPEC = REPOSITORY / "examples" / "sort4.yaml"


class StandIn(LocalServer):
    """Server with vLLM's interface of token ids around Slipstream's own engine."""

    engine = "vllm-server"

    def write_config(self, config: PretrainedConfig, folder: Path) -> Path:
        return _STAND_IN_SPEC

    def command(self, model: Path, options: Sequence[str]) -> list[str]:
        module = (sys.executable, "-m", "tests.helpers.torch_server")
        return [*module, str(self.port), str(model), TOKEN]

    @property
    def environment(self) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": "1"}


_KINDS: Mapping[str, tuple[type[LocalServer], Sequence[str]]] = {
    "vllm-server": (
        LocalVllm,
        ("--max-model-len", "512", "--max-num-batched-tokens", "512"),
    ),
    "sglang-server": (LocalSglang, ("--max-running-requests", "8")),
    "stand-in": (StandIn, ()),
}
_DRAIN_OPTIONS: Mapping[str, Sequence[str]] = {"vllm-server": ("--shutdown-timeout", "300")}
"""Options with which servers wait for their requests at their end."""


def tiny_config() -> Qwen2Config:
    """Returns a configuration that both engines support."""
    return Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.2,
        architectures=["Qwen2ForCausalLM"],
    )


def stand_in_config() -> PretrainedConfig:
    """Returns the configuration of the stand-in's model, whose versions differ as much."""
    spec = load_spec(_STAND_IN_SPEC)
    config = load_config(spec.model, load_tokenizer(spec.model))
    config.initializer_range = 0.2
    return config


def model_of(config: PretrainedConfig, version: int) -> PreTrainedModel:
    """Returns the model of a weight version. Threads share one random state, so that one draws at a time."""
    with _DRAWING, torch.random.fork_rng():
        torch.manual_seed(1000 + version)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        model.train(mode=False)
        return model


@dataclass(slots=True)
class Verdict:
    """Findings in all responses."""

    config: PretrainedConfig
    num_responses: int = 0
    num_aborted: int = 0
    num_crossing: int = 0
    """Responses with tokens of several versions."""
    num_tokens: int = 0
    num_wrong: int = 0
    """Tokens whose logprob is not that of the version that they state."""
    largest_difference: float = 0.0
    versions: set[int] = field(default_factory=set)

    def add(self, context: tuple[int, ...], result: GenerationResult) -> None:
        """Compares a response with the models of its versions."""
        self.num_responses += 1
        self.num_crossing += len(result.version_runs) > 1
        ids = torch.tensor([context + tuple(result.token_ids)])
        start = 0
        for version, count in result.version_runs:
            with torch.no_grad():
                logits: Tensor = model_of(self.config, version)(ids).logits
            rows = logits[0, len(context) - 1 + start : len(context) - 1 + start + count]
            tokens = torch.tensor(result.token_ids[start : start + count])[:, None]
            expected = rows.float().log_softmax(-1).gather(1, tokens)[:, 0]
            difference = (torch.tensor(result.logprobs[start : start + count]) - expected).abs()
            self.num_wrong += int((difference > _TOLERANCE).sum())
            self.largest_difference = max(self.largest_difference, float(difference.max()))
            self.num_tokens += count
            self.versions.add(version)
            start += count


async def _ask(engine: FleetEngine, worker: int, verdict: Verdict) -> None:
    """Sends one group of requests after the other, which begin together, as samples of one prompt do."""
    draws = random.Random(worker)
    for group in itertools.count():
        context = tuple(draws.choices(range(verdict.config.vocab_size), k=_CONTEXT))
        async with asyncio.TaskGroup() as requests:
            for number in range(_GROUP):
                request = GenerationRequest(
                    request_id=f"{worker}.{group}.{number}",
                    context_ids=context,
                    max_tokens=_RESPONSE,
                    seed=group * _GROUP + number,
                )
                # The first one of some groups is given up while the others go on.
                is_aborted = number == 0 and draws.random() < _ABORT_CHANCE
                abort_s = draws.uniform(0, _ABORT_WITHIN_S) if is_aborted else None
                requests.create_task(_generate(engine, request, abort_s, verdict))


async def _generate(
    engine: FleetEngine, request: GenerationRequest, abort_s: float | None, verdict: Verdict
) -> None:
    try:
        async with asyncio.timeout(abort_s):
            result = await engine.generate(request)
    except TimeoutError:
        verdict.num_aborted += 1
    else:
        await asyncio.to_thread(verdict.add, request.context_ids, result)


@contextmanager
def _counted_segments(sizes: Counter[int]) -> Iterator[None]:
    """Counts the requests to servers by their number of segments."""
    stream = FleetServer.stream

    def counted(
        server: FleetServer, body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[httpx.Response]:
        sizes[len(body.get("requests", (body,)))] += 1
        return stream(server, body)

    with patch.object(FleetServer, "stream", counted):
        yield


class Killer:
    """Kills servers at random times, or asks them to end (SIGTERM), and starts them again.

    Kills are drawn by update, not by second: on a busy host a start takes as long as many updates.
    """

    def __init__(self, servers: Sequence[LocalServer], seed: int, *, drains: bool = False) -> None:
        self.num_kills = 0
        self.drain_seconds: list[float] = []
        self._drains = drains
        self._draws = random.Random(seed)
        self._restarts: dict[LocalServer, Future[None]] = {}
        self._servers = servers
        self._pool = ThreadPoolExecutor(max_workers=len(servers))

    def draw(self) -> None:
        """Decides for each server that serves whether it is killed soon.

        Raises:
            RuntimeError: If a server did not come back.
        """
        for server in self._servers:
            restart = self._restarts.get(server)
            if restart is not None:
                if not restart.done():
                    continue
                restart.result()
            if self._draws.random() < _KILL_CHANCE:
                delay_s = self._draws.uniform(0, _KILL_WITHIN_S)
                self._restarts[server] = self._pool.submit(self._restart, server, delay_s)

    def close(self) -> None:
        """Waits until all servers have come back."""
        self._pool.shutdown()

    def _restart(self, server: LocalServer, delay_s: float) -> None:
        time.sleep(delay_s)
        if self._drains:
            began_at = time.monotonic()
            server.drain(_DRAIN_DEADLINE_S)
            self.drain_seconds.append(round(time.monotonic() - began_at, 1))
        else:
            server.kill()
        self.num_kills += 1
        server.start()
        server.wait()


async def _update(
    engine: FleetEngine,
    config: PretrainedConfig,
    killer: Killer,
    is_enough: Callable[[int], bool],
) -> int:
    """Puts one version after the other into service, and waits for tokens under it; returns their number."""
    began_at = time.monotonic()
    for version in itertools.count():
        if is_enough(version):
            break
        killer.draw()
        model = model_of(config, version)
        weights = {name: value.detach() for name, value in model.named_parameters()}
        async with asyncio.timeout(_UPDATE_DEADLINE_S):
            await engine.adopt_weights(version, weights)
            before = engine.stats().tokens_total
            while engine.stats().tokens_total < before + _TOKENS_PER_UPDATE:
                await asyncio.sleep(_PAUSE_S)
        if version % 10 == 0:
            progress = {"version": version, "tokens": engine.stats().tokens_total}
            print(
                json.dumps(progress | {"seconds": round(time.monotonic() - began_at)}), flush=True
            )
    return version


async def measure(
    servers: Sequence[LocalServer],
    config: PretrainedConfig,
    killer: Killer,
    is_enough: Callable[[int], bool],
) -> dict[str, Any]:
    """Returns what happened in all updates, until there are enough of them."""
    events: Counter[str] = Counter()
    name, verdict = servers[0].engine, Verdict(config)
    length = {str(ENGINES[name].length_argument): _MOST_TOKENS}
    engine = make_engine(
        name,
        EngineConfig(
            config=config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_running=_RUNNING,
            arguments={**engine_arguments([*servers]), **length},
            reach=AddressPolicy(("127.0.0.1",)),
            worker="bench",
            report=lambda kind, _: events.update([kind]),
        ),
    )
    assert isinstance(engine, FleetEngine)
    serving = asyncio.ensure_future(engine.run())
    sizes: Counter[int] = Counter()
    try:
        await engine.wait_ready()
        workers = range(_RUNNING // _GROUP)
        asking = [asyncio.ensure_future(_ask(engine, n, verdict)) for n in workers]
        updating = asyncio.ensure_future(_update(engine, config, killer, is_enough))
        with _counted_segments(sizes):
            done, _ = await asyncio.wait(
                {updating, serving, *asking}, return_when=asyncio.FIRST_COMPLETED
            )
        for task in done:
            task.result()
    finally:
        for task in (serving, *asking):
            task.cancel()
        await asyncio.wait([serving, *asking])
    return {
        "updates": updating.result(),
        "responses": verdict.num_responses,
        "responses_of_several_versions": verdict.num_crossing,
        "aborted": verdict.num_aborted,
        "requests_by_segments": {str(size): sizes[size] for size in sorted(sizes)},
        "tokens": verdict.num_tokens,
        "versions_with_tokens": len(verdict.versions),
        "tokens_under_a_wrong_version": verdict.num_wrong,
        "largest_logprob_difference": round(verdict.largest_difference, 7),
        "events": dict(sorted(events.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=_KINDS, default="sglang-server")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10, help="go on until as many happened")
    parser.add_argument("--drain", action="store_true", help="ask servers to end instead of kills")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no update later")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import_few_models()
    kind, options = _KINDS[arguments.engine]
    config = stand_in_config() if kind is StandIn else tiny_config()
    if arguments.drain:
        options = (*options, *_DRAIN_OPTIONS.get(arguments.engine, ()))
    with local_servers(kind, config, 2, "--dtype", "float32", *options) as servers:
        ends_at = time.monotonic() + arguments.seconds
        killer = Killer(servers, seed=0, drains=arguments.drain)

        def is_enough(version: int) -> bool:
            has_all = version >= arguments.updates and killer.num_kills >= arguments.kills
            return has_all or time.monotonic() > ends_at

        try:
            result = asyncio.run(measure(servers, config, killer, is_enough))
        finally:
            killer.close()
    num_kills = killer.num_kills
    counts = {"drains": num_kills, "drain_seconds": killer.drain_seconds}
    counts = counts if arguments.drain else {"kills": num_kills}
    result = {"engine": arguments.engine, "servers": 2, **counts, **result}
    few = num_kills * _KILL_SHARE < result["updates"]
    result["meets_bars"] = not (result["tokens_under_a_wrong_version"] or few)
    name = "fleet-drains" if arguments.drain else "fleet-updates"
    out = arguments.out or Path(f"bench/results/{name}-{arguments.engine}.json")
    report_to(out, result)


if __name__ == "__main__":
    main()
