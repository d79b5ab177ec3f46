"""vLLM through our adapter against the same vLLM engine driven directly, alternating in one run.

Usage: VENV/bin/python -m bench.rollout.vllm_overhead [--requests 64] [--tokens 128] [--out FILE.json]
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import Qwen2Config

from services.rollout.engines.base import GenerationRequest
from services.rollout.settings import prepare_vllm_environment


def config() -> Qwen2Config:
    """The smallest model that vLLM runs: the less the model costs, the more the adapter shows."""
    return Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        architectures=["Qwen2ForCausalLM"],
    )


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Tokens per second both ways."""
    is_cpu = not torch.cuda.is_available()
    prepare_vllm_environment(is_cpu=is_cpu)
    import vllm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from services.rollout.engines.vllm import VllmEngine

    extra = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 256 << 20}
    engine = VllmEngine(
        config(),
        dtype=torch.float32 if is_cpu else torch.bfloat16,
        max_running=arguments.requests,
        engine_arguments={"enforce_eager": True, **(extra if is_cpu else {})},
    )
    contexts = [
        tuple((37 * seed + place) % 500 for place in range(64))
        for seed in range(arguments.requests)
    ]

    async def through_adapter(repeat: int) -> None:
        await asyncio.gather(
            *[
                engine.generate(
                    GenerationRequest(
                        request_id=f"a{repeat}.{seed}",
                        context_ids=context,
                        max_tokens=arguments.tokens,
                        seed=seed,
                    )
                )
                for seed, context in enumerate(contexts)
            ]
        )

    async def directly(repeat: int) -> None:
        async def one(seed: int) -> None:
            parameters = SamplingParams(
                max_tokens=arguments.tokens,
                seed=seed,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": list(contexts[seed])}
            llm = engine._llm  # noqa: SLF001 -- the very same engine, without the adapter
            assert llm is not None
            async for _ in llm.generate(prompt, parameters, f"d{repeat}.{seed}"):
                pass

        await asyncio.gather(*[one(seed) for seed in range(arguments.requests)])

    seconds: dict[str, list[float]] = {"adapter": [], "direct": []}
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(engine.run())
        await engine.wait_ready()
        for repeat in range(arguments.repeats + 1):
            for name, work in (("adapter", through_adapter), ("direct", directly)):
                started_at = time.perf_counter()
                await work(repeat)
                seconds[name].append(time.perf_counter() - started_at)
        serving.cancel()
    tokens = arguments.requests * arguments.tokens
    rates = {name: tokens / statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "vllm": vllm.__version__,
        "device": "cpu" if is_cpu else torch.cuda.get_device_name(),
        "requests": arguments.requests,
        "tokens": tokens,
        **{f"{name}_tokens_per_s": round(rate) for name, rate in rates.items()},
        "adapter_share": round(rates["adapter"] / rates["direct"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(measure(arguments))
    print(json.dumps(report, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
