"""The comparison with TRL's colocated ``GRPOTrainer``: ``python -m bench.one_gpu_peer [--smoke]``.

It trains the model of ``bench.one_gpu --duel`` with the same prompts, lengths and samples per step, with
vLLM in its process. Its settings are the fastest ones found: micro-batches of ``--micro`` samples without
gradient checkpointing, old logprobs not computed again. Needs ``trl`` 1.16 and ``vllm``. Adds
its entry to ``bench/results/one-gpu-duel.json``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.e2e import tasks
from bench.e2e.shapes import DUEL, Shape, smoke
from bench.one_gpu import RESULTS, keep_in
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec

_FIRST = 3
_MAX_PROMPT_TOKENS = 128


def _reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Returns 1 for about half of the responses."""
    return [float(len(ids) % 2) for ids in completion_ids]


class _Ends(TrainerCallback):
    """Records when each step ended, and the mean length of its responses."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Records the time."""
        self.ends.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Records the length."""
        if logs and "completions/mean_length" in logs:
            self.lengths.append(float(logs["completions/mean_length"]))


def train(shape: Shape, model: Path, folder: Path, *, steps: int, micro: int) -> dict[str, Any]:
    """Trains; returns the rate of the steady steps."""
    began = time.time()
    is_real = shape.engine == "vllm"
    samples = shape.prompts_per_step * shape.group_size
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        num_generations=shape.group_size,
        max_completion_length=shape.max_response_tokens,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        learning_rate=shape.learning_rate,
        beta=0.0,
        temperature=1.0,
        bf16=is_real,
        use_cpu=not is_real,
        gradient_checkpointing=False,
        use_vllm=is_real,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=shape.max_response_tokens + _MAX_PROMPT_TOKENS,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    noted = _Ends()
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in tasks.prompts()]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[noted],
    )
    trainer.train()
    steady = noted.ends[_FIRST - 2 :]
    wall = steady[-1] - steady[0]
    return {
        "device": torch.cuda.get_device_name() if is_real else "cpu",
        "micro_batch": micro,
        "steps": len(steady) - 1,
        "samples_per_s": round((len(steady) - 1) * samples / wall, 2),
        "response_length_mean": round(sum(noted.lengths) / max(len(noted.lengths), 1), 1),
        "first_step_s": round(noted.ends[0] - began, 1),
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=4, help="samples of a forward pass")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU, without vLLM")
    arguments = parser.parse_args()
    shape = smoke(DUEL) if arguments.smoke else DUEL
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or Path(temporary) / "model"
        if not (model / "config.json").exists():
            shape.save_model(model)
        load_tokenizer(ModelSpec(path=str(model), tokenizer="bytes")).save(model)
        entry = train(
            shape, model, Path(temporary) / "out", steps=arguments.steps, micro=arguments.micro
        )
    print(json.dumps(entry), flush=True)
    if not arguments.smoke:
        keep_in(RESULTS / "one-gpu-duel.json", "TRL 1.16 colocated", entry)


if __name__ == "__main__":
    main()
