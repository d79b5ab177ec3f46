"""What asynchrony is worth: ``python -m bench.learning.asynchrony [--smoke]``.

The same training by all services on this host, synchronous and one step off: a random model of 1.3 billion
parameters that writes up to 512 tokens, on two GPUs, one for the trainer and one for a rollout. Its responses
end by chance, so their lengths vary as real ones do. Results go to ``bench/results/asynchrony.json``: means
over the steps after the first ones. ``--smoke`` takes a tiny model on any machine and keeps nothing.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from bench.whole_run import REPOSITORY, whole_run
from services.common.models.loading import build_model

RESULTS = REPOSITORY / "bench" / "results" / "asynchrony.json"
_LAGS = (0, 1)
_WARMUP_STEPS = 2
_NUMBERS = (
    "tokens",
    "seconds",
    "seconds_total",
    "trainer_wait_s",
    "rollout_idle_s",
    "sync_ms",
    "staleness_mean",
)
_VOCABULARY = 258
"""Of the byte tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    steps = _WARMUP_STEPS + (2 if arguments.smoke else arguments.steps)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(json.dumps(_spec(Path(folder), steps, is_smoke=arguments.smoke)))
        for lag in _LAGS:
            started = time.perf_counter()
            run = whole_run(Path(folder), [f"algorithm.max_staleness={lag}"], spec=spec)
            numbers = run.means(_NUMBERS, after=_WARMUP_STEPS)
            rows.append(
                {
                    "max_staleness": lag,
                    **numbers,
                    "tokens_per_s": round(numbers["tokens"] / numbers["seconds"], 1),
                    "run_s": round(time.perf_counter() - started, 1),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    synchronous = rows[0]["tokens_per_s"]
    for row in rows:
        row["over_synchronous"] = round(row["tokens_per_s"] / synchronous, 3)
    print(json.dumps(rows, indent=1))
    if not arguments.smoke:
        result = {"device": _device(), "torch": torch.__version__, "steps": steps, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _device() -> str:
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}" if count else "CPU"


def _spec(folder: Path, steps: int, *, is_smoke: bool) -> dict[str, Any]:
    """The run's specification, and the model it names."""
    model = folder / "model"
    hidden, intermediate, layers, heads = (64, 128, 2, 2) if is_smoke else (1536, 8960, 28, 12)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    dtype = torch.float32 if is_smoke else torch.bfloat16
    device = "cpu" if is_smoke else "cuda"
    build_model(config, dtype=dtype, device=device, seed=0).save_pretrained(model)
    task = Path(__file__).parent / "chance.py"
    return {
        "name": "asynchrony",
        "model": {"path": str(model), "tokenizer": "bytes"},
        "data": {
            "train": {"source": "python", "path": f"{task}:prompts"},
            "answer_column": None,
            "max_prompt_tokens": 128,
        },
        "rollout": {
            "replicas": 1,
            "group_size": 8,
            "max_response_tokens": 16 if is_smoke else 512,
            "rewards": [{"name": f"{task}:reward"}],
        },
        "trainer": {
            "steps": steps,
            "prompts_per_step": 4 if is_smoke else 32,
            "dtype": "float32" if is_smoke else "bfloat16",
            "optimizer": {"learning_rate": 1e-9},
        },
        "validation": {"every": 0},
    }


if __name__ == "__main__":
    main()
