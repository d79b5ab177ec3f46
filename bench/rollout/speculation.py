"""Speculative decoding against plain decoding of the same engine: equal distributions, tokens/s, tails.

Usage: ``python -m bench.rollout.speculation [--model FOLDER | --shape 7b] [--engine torch|vllm] [--smoke]
[--out FILE]``, where the engine is installed. FOLDER has a model of the Hub, such as the
SmolLM2-135M-Instruct that ``python -m bench.real_model.smollm2 FOLDER`` writes; ``--shape 7b`` is a random
model of Qwen2.5-7B's shape that copies its prompt: each token's successor in a cycle of 32 tokens has a
probability of .99. Without both, the model is tiny and random. ``--smoke`` makes few requests.

``distribution``: 20,000 requests draw four tokens after one prompt whose end has occurred before, with and
without proposals. ``p_values`` are those of chi-square tests that both have the same distribution of the
first token, and of each later one after the most frequent tokens before. ``logprobs``: the
recorded logprobs of 200 responses minus those that the engine without proposals computes for the same
tokens: mean of the differences, and of their absolute values. Those of responses without proposals, beside
them, are the rounding of the engine's dtype.

``speed``: responses of 256 tokens to prompts that repeat a table of numbers, at several numbers of running
requests, without proposals and with them; ``tail``: a batch of 64 such requests of which 60 end after 32
tokens and 4 after 512, as in a synchronous step. On a CPU, seconds are those that this process computed,
because other processes may use the machine.

Bars: all p-values >= .001, ``mean_difference`` <= 1e-3, ``speedup`` >= 1.5 at 8 running requests and >= .95
at the highest number, ``tail`` >= 1.2.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from bench.e2e.shapes import QWEN_7B, Shape
from bench.report import read_json, write_json
from bench.rollout.driven import make_config, opened
from services.common.models.loading import build_model, stored_tensors
from services.common.runspec.rollout import SpeculationSpec
from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.engine_config import EngineConfig

_TINY = Qwen2Config(
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
_PLACES = 4
_NUM_TOKENS = 256
_ROW_TOKENS = 7
_CYCLE = 32
_SUCCESSOR_LOGIT = 17.0
"""Logit of a token's successor in a copying model; those of all others are near 0."""


class Task:
    """Prompts whose responses repeat parts of the prompt.

    Args:
        folder: Folder of the tokenizer; None for random tokens.
        num_tokens: Tokens of a response.
        vocabulary: Number of token ids of a copying model, whose prompts repeat one cycle.
    """

    def __init__(
        self, folder: Path | None, *, num_tokens: int, vocabulary: int | None = None
    ) -> None:
        self._vocabulary_size = vocabulary
        self._num_rows = num_tokens // _ROW_TOKENS + 2
        self._tokenizer = None if folder is None else AutoTokenizer.from_pretrained(folder)
        vocabulary = [] if self._tokenizer is None else sorted(self._tokenizer.get_vocab())
        self._words = [word[1:] for word in vocabulary if re.fullmatch("Ġ[a-z]{4,8}", word)]

    def table(self, index: int) -> tuple[int, ...]:
        """Returns a table of numbers twice, and the beginning of a third copy."""
        rng = random.Random(index)
        rows = [f"{row}: {rng.randrange(100, 999)}" for row in range(1, self._num_rows)]
        text = "\n".join(rows)
        return self._encode(f"{text}\n\n{text}\n\n{rows[0]}\n", index)

    def sentences(self, index: int) -> tuple[int, ...]:
        """Returns sentences twice, and the beginning of a third copy, whose continuation is less certain."""
        rng = random.Random(index)
        words = [rng.sample(self._words or ["a"] * 5, 5) for _ in range(4)]
        text = " ".join(f"The {a} of {b} is {c}, and its {d} is {e}." for a, b, c, d, e in words)
        return self._encode(f"{text}\n\n{text}\n\n{' '.join(text.split()[:3])}", index)

    def _encode(self, text: str, seed: int) -> tuple[int, ...]:
        if self._tokenizer is not None:
            return tuple(self._tokenizer.encode(text))
        rng = random.Random(seed)
        if self._vocabulary_size is not None:
            start = rng.randrange(self._vocabulary_size // _CYCLE) * _CYCLE
            return (*range(start, start + _CYCLE),) * (self._num_rows * _ROW_TOKENS // _CYCLE)
        ids = [rng.randrange(2, 250) for _ in range(24)]
        return (*ids, *ids, *ids[:4])

    def requests(self, label: str, lengths: Sequence[int]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=f"{label}.{index}",
                context_ids=self.table(index),
                max_tokens=length,
                seed=index,
            )
            for index, length in enumerate(lengths)
        ]


def p_value(first: Counter[int], second: Counter[int]) -> float:
    """Returns the p-value of a chi-square test that two samples have the same distribution."""
    total = first + second
    shares = [sum(sample.values()) / sum(total.values()) for sample in (first, second)]
    frequent = {token for token, count in total.items() if count * min(shares) >= 5}
    statistic = 0.0
    rest = [
        sum(count for t, count in sampled.items() if t not in frequent)
        for sampled in (first, second)
    ]
    cells = [(first[token], second[token]) for token in frequent]
    cells += [(rest[0], rest[1])] if sum(rest) * min(shares) >= 5 else []
    for counts in cells:
        for count, share in zip(counts, shares, strict=True):
            expected = sum(counts) * share
            statistic += (count - expected) ** 2 / expected
    if len(cells) < 2:
        return 1.0
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


async def drawn(engine: Engine, task: "Task", count: int, *, seed: int) -> list[Any]:
    """Returns the tokens of many responses to one prompt, of which eight run at once."""
    prompt, slots = task.sentences(0), asyncio.Semaphore(8)

    async def draw(index: int) -> tuple[int, ...]:
        request = GenerationRequest(
            request_id=f"draw.{index}",
            context_ids=prompt,
            max_tokens=_PLACES,
            seed=seed + index,
        )
        async with slots:
            return (await engine.generate(request)).token_ids

    return await asyncio.gather(*map(draw, range(count)))


def compared(plain: list[Any], drafted: list[Any]) -> list[float]:
    """Returns the p-value of each position in the responses.

    A position is compared over the responses that begin with the most frequent tokens before it.
    """
    result: list[float] = []
    prefix: tuple[int, ...] = ()
    for position in range(_PLACES):
        samples = [
            Counter(tokens[position] for tokens in responses if tokens[:position] == prefix)
            for responses in (plain, drafted)
        ]
        result.append(round(p_value(*samples), 4))
        prefix += ((samples[0] + samples[1]).most_common(1)[0][0],)
    return result


async def differences(scorer: Engine, results: Sequence[tuple[Any, GenerationResult]]) -> Any:
    """Compares recorded logprobs with those that an engine computes for the same tokens."""
    errors: list[float] = []
    for request, result in results:
        scores = await scorer.score(request.context_ids + result.token_ids)
        errors += [
            logprob - other
            for logprob, other in zip(
                result.logprobs, scores[len(request.context_ids) - 1 :], strict=True
            )
        ]
    return {
        "mean_difference": abs(statistics.fmean(errors)),
        "mean_absolute": statistics.fmean(map(abs, errors)),
    }


class Bench:
    """Measures one engine with and without speculation.

    Args:
        engine_config: Configuration of the engine without speculation.
        weights: The model's tensors.
    """

    def __init__(
        self, name: str, engine_config: EngineConfig, weights: dict[str, Tensor], task: Task
    ) -> None:
        self._name = name
        self._engine_config = engine_config
        self._weights = weights
        self._task = task

    async def measure(
        self,
        speculation: SpeculationSpec | None,
        options: argparse.Namespace,
        *,
        others: Sequence[tuple[GenerationRequest, GenerationResult]] = (),
    ) -> dict[str, Any]:
        """Returns rates, drawn tokens and responses of the engine with one setting.

        Args:
            others: Responses of the other setting, whose logprobs this engine also computes.
        """
        result: dict[str, Any] = {"rates": {}}
        engine_config = replace(self._engine_config, speculation=speculation)
        async with opened(self._name, engine_config) as engine:
            await engine.adopt_weights(0, self._weights)
            for running in options.running:
                lengths = [options.tokens] * running
                result["rates"][running] = sum(lengths) / await self._median(
                    engine, f"speed{running}", lengths, options.repeats
                )
            tail = [options.tokens // 8] * options.tail_short + [2 * options.tokens] * 4
            result["tail_s"] = await self._median(engine, "tail", tail, options.repeats)
            result["drafts"] = engine.stats().drafts
            seed = 1 if speculation is None else 1 << 32
            result["drawn"] = await drawn(engine, self._task, options.draws, seed=seed)
            result["drafts_of_draws"] = engine.stats().drafts
            _, result["responses"] = await self._seconds(
                engine, "responses", [options.tokens // 4] * options.sequences
            )
            if others:
                result["scores"] = [
                    await differences(engine, responses)
                    for responses in (result["responses"], others)
                ]
        return result

    async def _median(
        self, engine: Engine, label: str, lengths: Sequence[int], repeats: int
    ) -> float:
        """Returns the median time of a batch, after one that is not counted."""
        times = [
            (await self._seconds(engine, f"{label}.{n}", lengths))[0] for n in range(1 + repeats)
        ]
        return statistics.median(times[1:])

    async def _seconds(
        self, engine: Engine, label: str, lengths: Sequence[int]
    ) -> tuple[float, list[tuple[GenerationRequest, GenerationResult]]]:
        clock = time.process_time if self._engine_config.device.type == "cpu" else time.perf_counter
        requests = self._task.requests(label, lengths)
        began = clock()
        results = await asyncio.gather(*map(engine.generate, requests))
        return clock() - began, list(zip(requests, results, strict=True))


def report_of(plain: Any, drafted: Any) -> dict[str, Any]:
    """Returns what was measured, and whether it reaches the bars."""
    speed = {
        running: {
            "plain_tokens_per_s": round(plain["rates"][running], 1),
            "tokens_per_s": round(drafted["rates"][running], 1),
            "speedup": round(drafted["rates"][running] / plain["rates"][running], 3),
        }
        for running in plain["rates"]
    }
    tail = round(plain["tail_s"] / drafted["tail_s"], 3)
    p_values = compared(plain["drawn"], drafted["drawn"])
    drafts, of_draws = drafted["drafts"], drafted["drafts_of_draws"]
    plain_scores, other_scores = plain["scores"]
    return {
        "distribution": {
            "draws": len(drafted["drawn"]),
            "drafts": of_draws.num_drafts - drafts.num_drafts,
            "accepted_tokens": of_draws.num_accepted - drafts.num_accepted,
            "p_values": p_values,
        },
        "logprobs": {
            "sequences": len(drafted["responses"]),
            "speculative": other_scores,
            "plain": plain_scores,
        },
        "speed": speed,
        "tail": {
            "plain_s": round(plain["tail_s"], 3),
            "seconds": round(drafted["tail_s"], 3),
            "speedup": tail,
        },
        "drafts": {
            "acceptance_length": round(drafts.acceptance_length, 3),
            "acceptance_rate": round(drafts.num_accepted / max(drafts.num_tokens, 1), 3),
        },
        "bars": {
            "p_values >= .001": min(p_values) >= 0.001,
            "mean_difference <= 1e-3": other_scores["mean_difference"] <= 1e-3,
            **{f"speedup at {n} >= 1.5": speed[n]["speedup"] >= 1.5 for n in (8,) if n in speed},
            "speedup at most >= .95": speed[max(speed)]["speedup"] >= 0.95,
            "tail >= 1.2": tail >= 1.2,
        },
    }


def copying_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a random model whose most probable token is the next one of the last token's cycle."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, dtype=dtype, device=device, seed=0)
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(len(embeddings), device=device)
    before = ids - ids % _CYCLE + (ids - 1) % _CYCLE
    with torch.no_grad():
        embeddings.normal_(std=100.0)  # all layers together add far less
        scale = _SUCCESSOR_LOGIT / config.hidden_size / 100.0
        model.get_output_embeddings().weight.copy_(embeddings[before] * scale)
    return model


def model_of(folder: Path | None, shape: Shape | None, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of a folder, a copying one of a shape, or a tiny random one."""
    if shape is not None:
        return copying_model(shape.config(), dtype)
    if folder is None:
        model = build_model(_TINY, dtype=dtype, device="cpu", seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return model
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return loaded


async def measure(options: argparse.Namespace) -> None:
    is_cuda = torch.cuda.is_available()
    dtype = getattr(torch, options.dtype or ("bfloat16" if is_cuda else "float32"))
    shape = {None: None, "7b": QWEN_7B}[options.shape]
    model = model_of(options.model, shape, dtype)
    speculation = SpeculationSpec(**json.loads(options.speculation))
    engine_config = make_config(
        model.config,
        dtype=dtype,
        max_running=max(options.running),
        arguments=json.loads(options.arguments),
    )
    weights = {
        name: value.to(engine_config.device) for name, value in stored_tensors(model).items()
    }
    task = Task(
        options.model,
        num_tokens=options.tokens,
        vocabulary=None if shape is None else model.config.vocab_size,
    )
    bench = Bench(options.engine, engine_config, weights, task)
    facts = {
        "engine": options.engine,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "model": options.shape or ("tiny" if options.model is None else "smollm2-135m"),
        "speculation": speculation.model_dump(exclude_none=True),
    }
    drafted = await bench.measure(speculation, options)
    plain = await bench.measure(None, options, others=drafted["responses"])
    report = facts | report_of(plain, drafted)
    print(json.dumps(report, indent=2), flush=True)
    if options.out is not None:
        results = read_json(options.out)
        write_json(options.out, results | {report["model"]: report})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument(
        "--model", type=Path, help="folder of a model; a tiny random one without it"
    )
    parser.add_argument("--shape", choices=["7b"], help="a random model of this shape that copies")
    parser.add_argument("--smoke", action="store_true", help="few requests")
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=_NUM_TOKENS, help="of a response, in speed")
    parser.add_argument("--tail-short", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speculation", default="{}", help="rollout.speculation, as JSON")
    parser.add_argument("--arguments", default="{}", help="engine arguments, as JSON")
    parser.add_argument(
        "--dtype", help="of weights and engine; bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.running, options.draws, options.sequences = [8], 400, 8
        options.tokens, options.tail_short, options.repeats = 64, 12, 1
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
