"""Measures routing replay: ``python -m bench.routing [WAY...] [--smoke]``.

With replay, the trainer uses the experts that the engine chose. A random mixture of experts in
bfloat16 trains through all services, one step off-policy, with rollout and trainer on the same GPU.
The benchmark reports the distance of the engine's and the trainer's logprobs, and the number of
tokens whose experts differ. A way is an engine and a value of ``rollout.routing_replay``, such as
``vllm,replay``; ``off`` gives the distance for an engine that does not report its experts. Without
a GPU the model is small. Results go to ``bench/results/routing-gpu.json`` or ``routing-cpu.json``,
next to those of other ways. Bar: with ``replay`` at most half of the distance without.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoConfig

from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, run_for
from services.common.models.loading import build_model

_TASKS = REPOSITORY / "bench" / "e2e" / "tasks.py"
_FIRST = 2
_WAYS = [
    f"{engine},{replay}"
    for engine in ("torch", "vllm", "sglang")
    for replay in ("off", "compare", "replay")
]
_NUMBERS = (
    "rollout_logprob_abs_diff",
    "routing_differs",
    "staleness_mean",
    "sync_ms",
    "expert_load_max",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", help=f"some of: {' '.join(_WAYS)}")
    parser.add_argument("--smoke", action="store_true", help="small, and nothing is written")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chosen", type=int, default=2, help="experts of a token, of 32")
    parser.add_argument("--out", type=Path, help="where results go")
    arguments = parser.parse_args()
    ways = [way.replace(" ", "") for way in arguments.ways] or ["torch,compare", "torch,replay"]
    if unknown := set(ways) - set(_WAYS):
        parser.error(f"{sorted(unknown)} are no ways; use some of {' '.join(_WAYS)}")
    is_small = arguments.smoke or not torch.cuda.is_available()
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    default = REPOSITORY / "bench" / "results" / f"routing-{kind}.json"
    out = arguments.out or (None if arguments.smoke else default)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        build_model(
            _config(is_small=is_small, num_chosen=arguments.chosen),
            dtype=torch.bfloat16,
            device="cpu",
            seed=0,
        ).save_pretrained(model)
        for way in ways:
            engine, replay = way.split(",")
            folder = Path(temporary) / f"{engine}-{replay}"
            spec = folder.with_suffix(".json")
            document = _spec(model, engine=engine, replay=replay, is_small=is_small)
            spec.write_text(json.dumps(document))
            run = run_for(arguments.steps, folder, (), spec=spec)
            means = {
                name: round(mean(step[name] for step in run.steps[_FIRST:]), 6)
                for name in _NUMBERS
                if name in run.steps[-1]
            }
            print(way, json.dumps(means), flush=True)
            if out is not None:
                _note(out, way, means, steps=arguments.steps, chosen=arguments.chosen)


def _note(out: Path, way: str, means: dict[str, float], *, steps: int, chosen: int) -> None:
    """Writes a way's results next to those of the others."""
    results = read_json(out)
    facts = {
        "device": device_name(),
        "torch": torch.__version__,
    }
    way_entry = {"steps": steps, "chosen": chosen, **means}
    write_json(out, results | facts | {way: way_entry})


def _spec(model: Path, *, engine: str, replay: str, is_small: bool) -> dict[str, Any]:
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
            "max_response_tokens": 32 if is_small else 512,
            "rewards": [{"name": f"{_TASKS}:reward"}],
        },
        "algorithm": {"max_staleness": 1},
        "trainer": {
            "steps": 10_000,
            "prompts_per_step": 4 if is_small else 16,
            "dtype": "bfloat16",
            "optimizer": {"learning_rate": 1e-9},
        },
        "validation": {"every": 0},
    }


def _config(*, is_small: bool, num_chosen: int) -> Any:
    """Returns a model of 0.7 billion parameters, or a small one; large weights make the experts matter."""
    hidden, layers, heads = (256, 4, 4) if is_small else (1024, 12, 16)
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
        num_experts=32,
        num_experts_per_tok=num_chosen,
        norm_topk_prob=True,
        initializer_range=0.06 if is_small else 0.03,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
    )


if __name__ == "__main__":
    main()
