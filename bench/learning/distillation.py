"""Distils SmolLM2-135M into a model of 32M weights, by sampled tokens or by the 64 most likely ones.

``python -m bench.learning.distillation``: all runs have the same prompts, steps and learning rate. The
student is the teacher without 29 of its 30 layers. Held-out divergences are exact, over the whole
vocabulary. Results go to ``bench/results/distillation.json`` or ``--out``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.real_model.smollm2 import make_folder
from bench.report import write_json
from bench.whole_run import REPOSITORY, exported, whole_run

RESULTS = REPOSITORY / "bench" / "results" / "distillation.json"
TOP_K = 64
_TEXTS = 2
"""Held-out texts of each prompt."""
_ARMS = {
    "sampled tokens, reverse KL": (),
    f"top-{TOP_K}, reverse KL": (
        "algorithm.loss=distill",
        f"algorithm.loss_arguments={{divergence: reverse_kl, top_k: {TOP_K}}}",
    ),
    f"top-{TOP_K}, forward KL": (
        "algorithm.loss=distill",
        f"algorithm.loss_arguments={{divergence: forward_kl, top_k: {TOP_K}}}",
    ),
}
_THINGS = (
    *(
        "river",
        "mountain",
        "teacher",
        "garden",
        "kitchen",
        "winter",
        "bicycle",
        "library",
        "market",
    ),
    *("bridge", "planet", "doctor", "violin", "forest", "island", "newspaper", "window", "engine"),
    *(
        "farmer",
        "castle",
        "ocean",
        "train",
        "desert",
        "painter",
        "lamp",
        "storm",
        "village",
        "clock",
    ),
)
_BEGINNINGS = ("The {} is", "A short fact about the {}:", "I like the {} because", "Every {} has")
_SPEC = """
name: distillation
model: {path: STUDENT}
teacher: {path: TEACHER}
data:
  train: {source: python, path: "BENCH:train"}
  answer_column: null
  max_prompt_tokens: 16
rollout: {replicas: 1, group_size: 1, max_response_tokens: TOKENS, rewards: []}
algorithm: {max_staleness: 0}
trainer:
  steps: STEPS
  prompts_per_step: PROMPTS
  dtype: float32
  optimizer: {learning_rate: 5.0e-4, warmup_steps: 3}
"""


def train() -> list[dict[str, str]]:
    """Returns the training prompts: all but those about the last four things."""
    return [{"prompt": begin.format(thing)} for thing in _THINGS[:-4] for begin in _BEGINNINGS]


def heldout() -> list[str]:
    """Returns the held-out prompts."""
    return [begin.format(thing) for thing in _THINGS[-4:] for begin in _BEGINNINGS]


def make_student(teacher: Path, folder: Path) -> None:
    """Writes the first layer of the teacher, with its embeddings, as a model."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


@torch.no_grad()
def divergences(folder: Path, teacher: Any, tokenizer: Any, *, num_tokens: int) -> dict[str, float]:
    """Returns held-out divergences in nats per token.

    ``reverse_kl`` is ``KL(student || teacher)`` on texts of the student, ``forward_kl`` is
    ``KL(teacher || student)`` on texts of the teacher.
    """
    student: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums = {"reverse_kl": 0.0, "forward_kl": 0.0}
    prompts = heldout()
    for name, writer in (("reverse_kl", student), ("forward_kl", teacher)):
        torch.manual_seed(0)
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            texts = writer.generate(
                ids,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                num_return_sequences=_TEXTS,
                pad_token_id=0,
            )
            rows: list[Tensor] = [
                model(texts).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
                for model in ((student, teacher) if writer is student else (teacher, student))
            ]
            kl = (rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean()
            sums[name] += float(kl) / len(prompts)
    return {name: round(value, 4) for name, value in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each response")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each step")
    parser.add_argument("--teacher", type=Path, help="folder with the teacher; default: made here")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        teacher_folder, student = arguments.teacher or folder / "teacher", folder / "student"
        make_folder(teacher_folder)
        make_student(teacher_folder, student)
        teacher: Any = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
        before = divergences(student, teacher, tokenizer, num_tokens=arguments.tokens)
        print("before", before, flush=True)
        spec = folder / "distillation.yaml"
        values = {
            "STUDENT": student,
            "TEACHER": teacher_folder,
            "TOKENS": arguments.tokens,
            "PROMPTS": arguments.prompts,
            "STEPS": arguments.steps,
        }
        text = _SPEC.replace("BENCH", str(Path(__file__)))
        for name, value in values.items():
            text = text.replace(name, str(value))
        spec.write_text(text, encoding="utf-8")
        entries: list[dict[str, Any]] = []
        for seed in range(arguments.seeds):
            for number, (arm, settings) in enumerate(_ARMS.items()):
                run_folder = folder / f"run-{number}-{seed}"
                extra = (f"seed={seed}", *settings)
                whole_run(run_folder, extra, spec=spec)
                after = divergences(
                    exported(run_folder, spec), teacher, tokenizer, num_tokens=arguments.tokens
                )
                entries.append({"kind": arm, "seed": seed, **after})
                print(entries[-1], flush=True)
                options = {
                    name: getattr(arguments, name) for name in ("steps", "tokens", "prompts")
                }
                result = {**options, "before": before, "runs": entries}
                write_json(arguments.out, result)


if __name__ == "__main__":
    main()
