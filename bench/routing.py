"""Experts that an engine chose, replayed by the trainer: ``python -m bench.routing [WAY...] [--smoke]``.

A random mixture of experts trains through all services, rollout and trainer on the same GPU: how far logprobs
of engine and trainer are apart, and for how many tokens their experts differ. Results go to
``bench/results/routing.json``. Bar: ``replay`` has at most half of the difference of ``compare``.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoConfig

from bench.whole_run import REPOSITORY, run_for
from services.common.models.loading import build_model

RESULTS = REPOSITORY / "bench" / "results" / "routing.json"
_TASKS = REPOSITORY / "bench" / "e2e" / "tasks.py"
_FIRST = 2
_WAYS = {
    "torch, compare": ("torch", "compare"),
    "torch, replay": ("torch", "replay"),
    "vllm, off": ("vllm", "off"),
    # Where it tells of them: from vLLM 0.32 on.
    "vllm, replay": ("vllm", "replay"),
}
_NUMBERS = ("rollout_logprob_abs_diff", "routing_differs", "sync_ms", "expert_load_max")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", help=f"some of: {'; '.join(_WAYS)}")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without a GPU")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    ways = (
        arguments.ways
        or ["torch, compare", "torch, replay", "vllm, off"][: 2 if arguments.smoke else 3]
    )
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        dtype = torch.float32 if arguments.smoke else torch.bfloat16
        config = _config(is_smoke=arguments.smoke)
        build_model(config, dtype=dtype, device="cpu", seed=0).save_pretrained(model)
        for way in ways:
            engine, replay = _WAYS[way]
            spec = Path(temporary) / f"{engine}-{replay}.json"
            document = _spec(model, engine=engine, replay=replay, is_smoke=arguments.smoke)
            spec.write_text(json.dumps(document))
            folder = Path(temporary) / spec.stem
            run = run_for(arguments.steps, folder, (), spec=spec)
            found[way] = {
                name: round(mean(step[name] for step in run.steps[_FIRST:]), 6)
                for name in _NUMBERS
                if name in run.steps[-1]
            }
            print(way, json.dumps(found[way]), flush=True)
            if not arguments.smoke:
                RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _spec(model: Path, *, engine: str, replay: str, is_smoke: bool) -> dict[str, Any]:
    return {
        "name": "routing",
        "model": {"path": str(model), "tokenizer": "bytes"},
        "data": {
            "train": {"source": "python", "path": f"{_TASKS}:prompts"},
            "answer_column": None,
            "max_prompt_tokens": 128,
        },
        "rollout": {
            "engine": engine,
            "replicas": 1,
            "routing_replay": replay,
            "group_size": 8,
            "max_response_tokens": 16 if is_smoke else 512,
            "rewards": [{"name": f"{_TASKS}:reward"}],
        },
        "trainer": {
            "steps": 10_000,
            "prompts_per_step": 4 if is_smoke else 16,
            "dtype": "float32" if is_smoke else "bfloat16",
            "optimizer": {"learning_rate": 1e-9},
        },
        "validation": {"every": 0},
    }


def _config(*, is_smoke: bool) -> Any:
    """Of 0.9 billion parameters; wide weights, so that experts matter."""
    hidden, layers, heads = (64, 2, 2) if is_smoke else (1024, 12, 16)
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=258,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden // heads,
        moe_intermediate_size=hidden // 2,
        num_experts=8 if is_smoke else 32,
        num_experts_per_tok=2 if is_smoke else 8,
        norm_topk_prob=True,
        initializer_range=0.06,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
    )


if __name__ == "__main__":
    main()
