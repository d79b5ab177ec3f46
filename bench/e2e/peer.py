"""The same training by TRL's asynchronous trainer: ``CUDA_VISIBLE_DEVICES=0 python -m bench.e2e.peer``.

vLLM's own server runs on the second GPU and ``AsyncGRPOTrainer`` on the first: with the same random
model, prompts, lengths, samples per step and staleness bound as "lag 4" of ``bench.e2e``, and TRL's
defaults otherwise. Its attention kernel comes from a hub that may be unreachable, so torch's
FlashAttention 2 replaces it. Needs two GPUs, ``trl`` 1.16 and ``vllm``. Adds its entry to
``bench/results/e2e-SHAPE.json``.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_rollout_worker as worker

from bench.e2e import tasks
from bench.e2e.shapes import SHAPES, Shape
from bench.e2e.timeline import FIRST_STEP
from bench.report import read_json, write_json
from bench.whole_run import REPOSITORY
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec

_PORT = 8123
_GROUPS_PER_MICRO_BATCH = 4
_START_TIMEOUT_S = 300.0


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Causal attention over packed sequences, with gradients."""
    output, *_rest = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        query,
        key,
        value,
        starts_q,
        starts_k,
        int(longest_q),
        int(longest_k),
        0.0,
        True,
        False,
        scale=softmax_scale,
    )
    return output


# At module level, because TRL's rollout worker is spawned and imports this module.
packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_varlen)  # noqa: SLF001
# No tools are called, and the random model's template cannot parse calls.
worker.add_response_schema = lambda tokenizer: tokenizer
worker.parse_response = lambda *_, **__: {"role": "assistant", "content": ""}


def _reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Returns 1 for about half of the responses."""
    return [float(len(ids) % 2) for ids in completion_ids]


class _Steps(TrainerCallback):
    """Records the logs and the time of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Records the metrics of a step."""
        if logs and "batch/samples_per_step" in logs:
            self.steps.append({"time": time.time(), **logs})
            print(json.dumps({"step": state.global_step, **self.steps[-1]}), flush=True)


def serve(model: Path, *, max_running: int) -> subprocess.Popen[bytes]:
    """Starts vLLM's server on the second GPU."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(_PORT)),
        *("--model", str(model), "--served-model-name", str(model), "--dtype", "bfloat16"),
        *("--max-num-seqs", str(max_running), "--logprobs-mode", "processed_logprobs"),
        *("--max-model-len", "2048", "--weight-transfer-config", '{"backend":"nccl"}'),
    ]
    environment = {
        **os.environ,  # noqa: TID251 -- a bench has no settings
        "CUDA_VISIBLE_DEVICES": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return subprocess.Popen(command, env=environment, start_new_session=True)


def train(shape: Shape, model: Path, folder: Path, *, steps: int) -> dict[str, Any]:
    """Trains and returns the rates of the steady steps."""
    step_samples = shape.prompts_per_step * shape.group_size
    row = _GROUPS_PER_MICRO_BATCH * shape.group_size
    config = AsyncGRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        num_generations=shape.group_size,
        max_completion_length=shape.max_response_tokens,
        per_device_train_batch_size=row,
        gradient_accumulation_steps=step_samples // row,
        token_budget=0,
        max_staleness=4,
        gradient_checkpointing=False,
        learning_rate=1e-9,
        vllm_server_base_url=f"http://127.0.0.1:{_PORT}",
        vllm_server_timeout=_START_TIMEOUT_S,
        save_strategy="no",
        report_to="none",
    )
    prompts = [[{"role": "user", "content": row["prompt"][:90]}] for row in tasks.prompts()]
    random.Random(0).shuffle(prompts)
    noted = _Steps()
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[noted],
    )
    trainer.train()
    steady = noted.steps[FIRST_STEP - 1 :]
    wall = steady[-1]["time"] - noted.steps[FIRST_STEP - 2]["time"]
    samples = sum(step["batch/samples_per_step"] for step in steady)
    names = [
        name for name in steady[0] if name.startswith(("batch/", "time/", "sync/", "rollout/"))
    ]
    return {
        "steps": len(steady),
        "step_s": round(wall / len(steady), 4),
        "samples_per_s": round(samples / wall, 2),
        "reported": {
            name: round(mean(float(step.get(name, 0.0)) for step in steady), 4) for name in names
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["geometric"], default="geometric")
    parser.add_argument("--steps", type=int, default=FIRST_STEP + 7)
    parser.add_argument(
        "--model", type=Path, help="a model that bench.e2e made; default: a new one"
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/e2e-SHAPE.json")
    arguments = parser.parse_args()
    if torch.cuda.device_count() != 1:
        parser.error(
            "set CUDA_VISIBLE_DEVICES=0: the trainer takes one GPU, the server the next one"
        )
    shape = SHAPES[arguments.shape]
    out = arguments.out or REPOSITORY / "bench" / "results" / f"e2e-{arguments.shape}.json"
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or Path(temporary) / "model"
        if not (model / "config.json").exists():
            shape.save_model(model)
        load_tokenizer(ModelSpec(path=str(model), tokenizer="bytes")).save(model)
        server = serve(model, max_running=1024)
        try:
            entry = train(shape, model, Path(temporary), steps=arguments.steps)
        finally:
            server.terminate()
            server.wait(timeout=60)
    print(json.dumps(entry), flush=True)
    results = read_json(out)
    results["peer"] = {"name": "TRL 1.16 AsyncGRPOTrainer, vLLM 0.26 server", **entry}
    write_json(out, results)


if __name__ == "__main__":
    main()
