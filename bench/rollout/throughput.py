"""Torch engine against Hugging Face ``generate`` in static batches, same model, lengths and run.

Usage: python -m bench.rollout.throughput [--requests 64] [--batch 16] [--out FILE.json]

Response lengths are long-tailed (log-normal) and the same for both sides: a request ends at its
length, as if an end token was sampled. ``generate`` gets batches of requests in arrival order, so
each batch runs as long as its longest response; the engine refills a slot as soon as it is free.
Only requested tokens count.
"""

import argparse
import asyncio
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.report import report_to
from services.extras.fake_engine.engine import LongTail
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine

MAX_TOKENS = 512
PROMPT = tuple(range(2, 34))


def build_model(device: str) -> PreTrainedModel:
    """Returns a random model of 1.2 M parameters without an end token."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=160,
        intermediate_size=416,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(device).eval()


async def time_engine(model: PreTrainedModel, lengths: Sequence[int], places: int) -> float:
    """Returns the seconds in which the engine finishes all requests."""
    engine = TorchEngine(model, max_running=places)
    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(engine.run())
        started_at = time.perf_counter()
        results = await asyncio.gather(
            *[
                engine.generate(
                    GenerationRequest(
                        request_id=str(seed), context_ids=PROMPT, max_tokens=length, seed=seed
                    )
                )
                for seed, length in enumerate(lengths)
            ]
        )
        seconds = time.perf_counter() - started_at
        decoding.cancel()
    assert [len(result.token_ids) for result in results] == list(lengths)
    return seconds


@torch.inference_mode()
def time_generate(model: PreTrainedModel, lengths: Sequence[int], places: int) -> float:
    """Returns the seconds in which ``generate`` finishes all requests in static batches."""
    model.set_attn_implementation("sdpa")
    started_at = time.perf_counter()
    for first in range(0, len(lengths), places):
        batch = lengths[first : first + places]
        inputs = torch.tensor([PROMPT] * len(batch), device=model.device)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max(batch),
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert output.sequences.shape[1] == len(PROMPT) + max(batch)
    return time.perf_counter() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--median", type=float, default=48.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/rollout-throughput-cpu.json")
    )
    arguments = parser.parse_args()
    tail = LongTail(median=arguments.median, sigma=arguments.sigma)
    lengths = [min(tail.length(seed), MAX_TOKENS) for seed in range(arguments.requests)]
    model = build_model(arguments.device)
    engine_s, generate_s = [], []
    for _ in range(arguments.repeats + 1):
        engine_s.append(asyncio.run(time_engine(model, lengths, arguments.batch)))
        generate_s.append(time_generate(model, lengths, arguments.batch))
    tokens = sum(lengths)
    engine_rate = tokens / min(engine_s[1:])
    generate_rate = tokens / min(generate_s[1:])
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "requests": arguments.requests,
        "places": arguments.batch,
        "tokens": tokens,
        "longest": max(lengths),
        "engine_tokens_per_s": round(engine_rate),
        "generate_tokens_per_s": round(generate_rate),
        "speedup": round(engine_rate / generate_rate, 2),
    }
    report_to(arguments.out, report)


if __name__ == "__main__":
    main()
