"""The same training by TRL's colocated GRPO trainer: ``python -m bench.real_model.peer [TASK] [--smoke]``.

``GRPOTrainer`` with vLLM in its process, on the task, batch, learning rate and number of samples of
``bench.real_model`` (``addition``) or ``bench.real_model.gsm8k`` (``gsm8k``): without gradient checkpointing,
without a second computation of old logprobs (``vllm_importance_sampling_correction=False``), and with large
micro-batches. The same engine answers the held-out questions between two steps; their time is reported and
included in the curve. Needs ``trl`` 1.16 and ``vllm``.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.real_model import gsm8k, qwen, smollm2
from bench.real_model.__main__ import RESULTS, keep
from bench.real_model.setting import ADDITION, Setting, smoke
from services.common.callables import load_callable
from services.extras.math_verify.answer import math_answer

_STEADY = 5
_NAME = "TRL 1.16 colocated"
Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work that both sides train on."""

    setting: Setting
    train: Sequence[Row]
    """Rows with ``prompt`` and ``answer``."""
    heldout: Sequence[Row]
    score: Callable[[str, str], float]
    """Score of a response's text for an answer."""
    make_folder: Callable[[Path, Path | None], None]
    """Writes the model to a folder, from packages in another one."""
    micro: int
    """Samples of a forward pass, unless the command says another number."""
    results: Path


def addition() -> Task:
    """Returns the task of ``bench.real_model``."""
    train, heldout, score = (
        load_callable(f"{ADDITION}:{name}") for name in ("train", "heldout", "score")
    )
    return Task(
        setting=Setting(),
        train=train(),
        heldout=heldout(),
        score=score,
        make_folder=smollm2.make_folder,
        micro=64,
        results=RESULTS,
    )


def grade_school(data: Path) -> Task:
    """Returns the task of ``examples/gsm8k-1.5b.yaml``.

    Args:
        data: Folder with ``train.jsonl`` and ``test.jsonl`` of GSM8K.
    """
    spec = yaml.safe_load(gsm8k.EXAMPLE.read_text(encoding="utf-8"))
    data_spec, rollout, trainer = spec["data"], spec["rollout"], spec["trainer"]

    def rows(name: str) -> list[Row]:
        lines = (data / name).read_text(encoding="utf-8").splitlines()
        return [
            {
                "prompt": data_spec["prompt_template"].replace("{prompt}", row["question"]),
                "answer": row["answer"],
            }
            for row in map(json.loads, lines)
        ]

    return Task(
        setting=Setting(
            steps=trainer["steps"],
            prompts_per_step=trainer["prompts_per_step"],
            group_size=rollout["group_size"],
            max_prompt_tokens=data_spec["max_prompt_tokens"],
            max_response_tokens=rollout["max_response_tokens"],
            learning_rate=float(trainer["optimizer"]["learning_rate"]),
            warmup_steps=trainer["optimizer"]["warmup_steps"],
            evaluate_every=spec["validation"]["every"],
        ),
        train=rows("train.jsonl"),
        heldout=rows("test.jsonl")[: data_spec["heldout"]["gsm8k"]["limit"]],
        score=lambda text, answer: math_answer("", text, answer, {}),
        make_folder=qwen.make_folder,
        micro=32,
        results=gsm8k.RESULTS,
    )


class _Curve(TrainerCallback):
    """Evaluates between steps and records when each step ended."""

    def __init__(self, task: Task, setting: Setting, began: float) -> None:
        self._task = task
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
        rows = self._task.heldout
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
                {"prompt_token_ids": tokenizer(prompt, add_special_tokens=False)["input_ids"]}
                for prompt in prompts
            ]
            results = trainer.vllm_generation.llm.generate(inputs, parameters, use_tqdm=False)
            texts = [result.outputs[0].text for result in results]
        else:
            texts = [""] * len(rows)
        greedy = sum(
            self._task.score(text, row["answer"]) for text, row in zip(texts, rows, strict=True)
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
    task: Task,
    setting: Setting,
    model: Path,
    folder: Path,
    *,
    seed: int,
    micro: int,
    engine_share: float,
) -> dict[str, Any]:
    """Trains; returns curve and rates as ``bench.real_model`` does."""
    began = time.time()

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]
        return [task.score(text, right) for text, right in zip(texts, answer, strict=True)]

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
        vllm_max_model_length=max(512, setting.max_prompt_tokens + setting.max_response_tokens),
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
            for row in task.train
        ]
    )
    curve = _Curve(task, setting, began)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[curve],
    )
    curve.trainer = trainer
    trainer.train()
    return {
        "steps": len(curve.ends),
        "curve": curve.points,
        "reward_mean": curve.rewards,
        "seconds_to_first_step": round(curve.ends[0], 1),
        "samples_per_s": _rate(curve, setting.samples_per_step),
        "micro_batch": micro,
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if is_real else 0.0,
    }


def _rate(curve: _Curve, samples_per_step: int) -> float | None:
    """Returns samples a second of the steady steps, without evaluations; None without such steps."""
    steady = curve.ends[_STEADY - 1 :]
    if len(steady) < 2:
        return None
    pauses = curve.points[-1]["evaluated_s"] - curve.points[0]["evaluated_s"]
    wall = steady[-1] - steady[0] - pauses * len(steady) / len(curve.ends)
    return round((len(steady) - 1) * samples_per_step / wall, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=("addition", "gsm8k"), default="addition")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--micro", type=int, help="samples of a forward pass")
    parser.add_argument("--engine-share", type=float, default=0.3, help="of the GPU's memory")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheels", type=Path, help="the model's package, or a folder of packages")
    parser.add_argument("--data", type=Path, default=gsm8k.SMALL_DATA, help="folder with GSM8K")
    parser.add_argument("--smoke", action="store_true", help="without vLLM, on a CPU")
    parser.add_argument("--out", type=Path, help="default: the file of the task's other side")
    arguments = parser.parse_args()
    task = addition() if arguments.task == "addition" else grade_school(arguments.data)
    setting = smoke(task.setting) if arguments.smoke else task.setting
    if arguments.steps:
        setting = dataclasses.replace(setting, steps=arguments.steps)
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or Path(temporary) / "model"
        task.make_folder(model, arguments.wheels)
        entry = train(
            task,
            setting,
            model,
            Path(temporary) / "out",
            seed=arguments.seed,
            micro=arguments.micro or task.micro,
            engine_share=arguments.engine_share,
        )
    print(json.dumps(entry), flush=True)
    if not arguments.smoke:
        out = arguments.out or task.results
        keep([{"variant": _NAME, "seed": arguments.seed, **entry}], out)


if __name__ == "__main__":
    main()
