"""Cost of ``rollout.reproducible: batch_invariant`` with the engine torch, and its equality with the trainer.

Usage: ``python -m bench.rollout.invariant [--smoke]``; with ``--device cuda`` models have the shapes of
Qwen3-0.6B and Llama-3.2-1B, in bfloat16.

Equality: the engine decodes 10,000 tokens, whose requests join and leave; the trainer scores them in packs
with shared prompts. ``max_difference`` is that of their logprobs, and ``plain_max_difference`` that of both
without invariant operators. Cost: seconds of plain operators and of invariant ones, alternately measured, for
decode steps of several numbers of requests, a prefill pass, and the trainer's forward and backward pass. On a
CPU, seconds are those that this process computed on one thread, because other processes may use the machine.

Bars: ``max_difference`` is 0; a decode step takes at most 1.3 times as long. Results go to
``bench/results/rollout-invariant-DEVICE.json``.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from bench.report import write_json
from services.common.models.configs import preset_config
from services.common.runspec.engines import InvariantEngine
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.decoding import DecodeBatch
from services.rollout.engines.torch.engine import use_decoding_kernels
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

RESULTS = Path(__file__).parents[1] / "results"
TEMPERATURE = 0.7
_GROUP = 4
_PER_PACK = 8
_MAX_COST = 1.3
_STEPS = 8
_WARM = 4


def shapes(*, is_large: bool) -> dict[str, PretrainedConfig]:
    """Returns models whose key-value heads serve two and four heads."""
    common: dict[str, Any] = {"max_position_embeddings": 4096, "pad_token_id": 0}
    if is_large:
        return {
            "qwen3-0.6b": Qwen3Config(
                vocab_size=151_936,
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                tie_word_embeddings=True,
                **common,
            ),
            "llama-1b": LlamaConfig(
                vocab_size=128_256,
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                tie_word_embeddings=True,
                **common,
            ),
        }
    small: dict[str, Any] = {
        "vocab_size": 1001,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        **common,
    }
    tiny = preset_config("tiny:qwen2-0.4m", vocab_size=258, eos_id=257, pad_id=0)
    del tiny["model_type"], tiny["eos_token_id"]
    return {
        "qwen2-0.4m": Qwen2Config(**tiny),
        "qwen3-3m": Qwen3Config(num_key_value_heads=4, head_dim=32, **small),
        "llama-3m": LlamaConfig(num_key_value_heads=2, **small),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few tokens; writes no result")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.device, repeats=2 if arguments.smoke else arguments.repeats)
    num_tokens, running = (600, (8,)) if arguments.smoke else (10_000, (8, 32, 128))
    name = torch.cuda.get_device_name() if bench.is_cuda else "cpu"
    report: dict[str, Any] = {"device": name, "dtype": str(bench.dtype), "models": {}}
    for model, config in shapes(is_large=bench.is_cuda).items():
        entry = report["models"][model] = {
            **bench.equality(config, num_tokens),
            "decode": {str(count): bench.decoding(config, count) for count in running},
            "prefill": bench.prefill(config),
            "training": bench.training(config),
        }
        print(json.dumps({model: entry}, indent=1), flush=True)
    entries = report["models"].values()
    costs = [decoding["cost"] for entry in entries for decoding in entry["decode"].values()]
    report["bars"] = {
        "the logprobs of engine and trainer are equal": all(
            entry["max_difference"] == 0.0 for entry in entries
        ),
        "a decode step takes at most 1.3 times as long": max(costs) <= _MAX_COST,
    }
    print(json.dumps(report["bars"], indent=1))
    if not arguments.smoke:
        file = RESULTS / f"rollout-invariant-{'-'.join(name.lower().split())}.json"
        write_json(file, report)


class Bench:
    """Compares plain and invariant operators on a device."""

    def __init__(self, device: str, *, repeats: int) -> None:
        self.is_cuda = device == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self._device = torch.device(device)
        self._repeats = repeats

    def equality(self, config: PretrainedConfig, num_tokens: int) -> dict[str, Any]:
        """Returns the differences of the logprobs of engine and trainer."""
        plain, _ = self._difference(config, num_tokens, is_invariant=False)
        difference, count = self._difference(config, num_tokens, is_invariant=True)
        return {"tokens": count, "max_difference": difference, "plain_max_difference": plain}

    def decoding(self, config: PretrainedConfig, count: int) -> dict[str, float]:
        """Measures decode steps of a number of requests."""

        def steps(batch: DecodeBatch) -> Callable[[], object]:
            batch_requests = list(requests(count, tokens=1024, vocabulary=config.vocab_size))
            batch.admit([replace(request, max_tokens=1024) for request in batch_requests])
            return lambda: [batch.step(0) for _ in range(_STEPS)]

        batches = [self._batch(config, is_invariant=is_invariant) for is_invariant in (False, True)]
        plain, invariant = self._alternately([steps(batch) for batch in batches])
        return {
            "plain_tokens_per_s": round(count * _STEPS / plain, 1),
            "invariant_tokens_per_s": round(count * _STEPS / invariant, 1),
            "cost": round(invariant / plain, 3),
        }

    def prefill(self, config: PretrainedConfig) -> dict[str, float]:
        """Measures the prefill of 16 contexts of up to 128 tokens."""

        def passes(batch: DecodeBatch) -> Callable[[], object]:
            batch_requests = list(requests(16 * _GROUP, tokens=1, vocabulary=config.vocab_size))

            def admit() -> None:
                batch.admit(batch_requests)
                batch.abort(None)

            return admit

        batches = [self._batch(config, is_invariant=is_invariant) for is_invariant in (False, True)]
        return _costs(*self._alternately([passes(batch) for batch in batches]))

    def training(self, config: PretrainedConfig) -> dict[str, float]:
        """Measures forward and backward passes over packs of eight samples."""
        vocabulary = config.vocab_size
        pack_requests = list(requests(4 * _PER_PACK, tokens=128, vocabulary=vocabulary))
        generator = torch.Generator().manual_seed(2)
        responses = [
            torch.randint(2, vocabulary, (request.max_tokens,), generator=generator)
            for request in pack_requests
        ]
        packs = list(self._packs(pack_requests, responses))

        def passes(policy: Policy) -> Callable[[], object]:
            def train() -> None:
                for packed in packs:
                    policy(packed)[0].sum().backward()
                policy.zero_grad()

            return train

        policies = [
            self._policy(config, is_invariant=is_invariant) for is_invariant in (False, True)
        ]
        return _costs(*self._alternately([passes(policy) for policy in policies]))

    def _difference(
        self, config: PretrainedConfig, num_tokens: int, *, is_invariant: bool
    ) -> tuple[float, int]:
        """Returns the max difference, and the number of tokens."""
        batch = self._batch(config, is_invariant=is_invariant)
        waiting = list(requests(num_tokens // 60, tokens=128, vocabulary=config.vocab_size))
        scored_requests = list(waiting)
        results: dict[str, GenerationResult] = {}
        while waiting or len(batch):
            if waiting and len(batch) < 48:
                batch.admit([waiting.pop() for _ in range(min(5, len(waiting)))])
            results |= dict(batch.step(0))
        policy = self._policy(config, is_invariant=is_invariant)
        responses = [
            torch.tensor(results[request.request_id].token_ids) for request in scored_requests
        ]
        with torch.no_grad():
            scored = [policy(packed)[0].cpu() for packed in self._packs(scored_requests, responses)]
        expected = [
            value for request in scored_requests for value in results[request.request_id].logprobs
        ]
        difference = (torch.cat(scored) - torch.tensor(expected)).abs().max().item()
        _collect()
        return difference, len(expected)

    def _packs(
        self, pack_requests: list[GenerationRequest], responses: list[Tensor]
    ) -> Iterator[PackedTokens]:
        for start in range(0, len(pack_requests), _PER_PACK):
            rows = slice(start, start + _PER_PACK)
            yield pack(
                Jagged.from_list(
                    [torch.tensor(request.context_ids).int() for request in pack_requests[rows]]
                ),
                Jagged.from_list([response.int() for response in responses[rows]]),
                device=self._device,
                shares_prefixes=True,
            )

    def _model(self, config: PretrainedConfig) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        # Larger weights, so that the distributions of tokens are not uniform.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return model.to(device=self._device, dtype=self.dtype)

    def _batch(self, config: PretrainedConfig, *, is_invariant: bool) -> DecodeBatch:
        model = self._model(config).eval().requires_grad_(False)
        use_decoding_kernels(model, is_invariant=is_invariant)
        return DecodeBatch(model, is_invariant=is_invariant)

    def _policy(self, config: PretrainedConfig, *, is_invariant: bool) -> Policy:
        engine: InvariantEngine | None = "torch" if is_invariant else None
        return Policy(self._model(config), temperature=TEMPERATURE, engine=engine)

    def _alternately(self, functions: list[Callable[[], object]]) -> list[float]:
        """Returns the median seconds of each function."""
        seconds: list[list[float]] = [[] for _ in functions]
        for number in range(_WARM + self._repeats):
            for function, function_seconds in zip(functions, seconds, strict=True):
                began = self._now()
                function()
                if number >= _WARM:
                    function_seconds.append(self._now() - began)
        _collect()
        return [median(function_seconds) for function_seconds in seconds]

    def _now(self) -> float:
        if not self.is_cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def requests(count: int, *, tokens: int, vocabulary: int) -> Iterator[GenerationRequest]:
    """Yields groups of requests with a context of up to 128 tokens, and up to so many response tokens."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        if number % _GROUP == 0:
            length = int(torch.randint(8, 129, (1,), generator=generator))
            context = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
        yield GenerationRequest(
            request_id=str(number),
            context_ids=tuple(context),
            max_tokens=int(torch.randint(1, tokens + 1, (1,), generator=generator)),
            seed=number,
            temperature=TEMPERATURE,
        )


def _costs(plain: float, invariant: float) -> dict[str, float]:
    return {
        "plain_s": round(plain, 4),
        "invariant_s": round(invariant, 4),
        "cost": round(invariant / plain, 3),
    }


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
