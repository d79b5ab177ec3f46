"""Writes a specification to begin with, for a model and a data set, with what each key does beside it."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import console, fail
from services.common.spec.data import DataSpec, PromptSourceSpec
from services.common.spec.model import TINY_PREFIX
from services.rollout.data import open_source
from services.rollout.rows import Row

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
_ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "output")
_EXAMPLE = ("sort4.yaml", "sort4.py")
# Beside the package in the repository, within it where it is installed.
_EXAMPLE_FOLDERS = (Path(__file__).parents[2] / "examples", Path(__file__).parents[1] / "examples")
_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}

_TEMPLATE = """\
# {name}: `slipstream validate {file}` checks it, `slipstream run {file}` trains here.
# All keys, with types and defaults, are in docs/runspec.md.
name: {name}
seed: 0

model:
  path: {model}                 # a folder, a Hugging Face id, or a preset such as tiny:qwen2-0.4m

data:
  train: {{source: {source}, path: {path}}}
  # heldout: {{source: {source}, path: ..., limit: 200}}   # prompts that are only evaluated
  prompt_column: {prompt}
  answer_column: {answer}       # what the reward compares with; null if it needs none
  chat_template: {chat}         # whether prompts go through the tokenizer's chat template
  max_prompt_tokens: 1024       # a longer prompt is set aside and counted

rollout:
  engine: torch                 # vllm or sglang for real models on GPUs, once installed
  replicas: {replicas}          # rollout processes
  group_size: 8                 # responses per prompt
  max_response_tokens: {response}
  rewards:
    - name: {reward}            # exact_match, math_verify, code_tests, a URL, or file.py:function
      # A function of yours is called with (prompt, response, answer, row) and returns a number.

algorithm:
  advantage: grpo
  loss: ppo
  max_staleness: 1              # versions that a sample may lag behind; 0 trains synchronously

trainer:
  steps: 100
  prompts_per_step: 32          # groups that form one batch
  dtype: {dtype}
  compile: {compiled}               # torch.compile: less time and memory on GPUs, a longer start
  optimizer:
    learning_rate: {rate}
  checkpoint: {{every: 20, keep: 2}}

validation:
  every: 10                     # versions between evaluations of data.heldout
"""


def init(
    model: Annotated[str, typer.Argument(help="Folder, Hugging Face id or tiny: preset.")] = "",
    data: Annotated[
        str, typer.Argument(help="JSONL or Parquet file, file.py:function or Hugging Face id.")
    ] = "",
    file: Annotated[Path, typer.Option(help="Where the specification goes.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    example: Annotated[
        bool, typer.Option("--example", help="Write the example sort4 instead, with its code.")
    ] = False,
) -> None:
    """Write a commented specification for a model and a data set."""
    if example:
        _write_example(file.parent, force=force)
        return
    if not model or not data:
        raise typer.BadParameter("expected MODEL and DATA, or --example, which needs neither")
    _refuse_if_there(file, force=force)
    source = PromptSourceSpec(source=_kind(data), path=data)
    try:
        row = _first_row(source)
    except (ValueError, OSError) as error:
        fail(str(error))
        raise typer.Exit(2) from None
    is_tiny = model.startswith(TINY_PREFIX)
    prompt, answer = _column(row, _PROMPTS), _column(row, _ANSWERS)
    text = _TEMPLATE.format(
        file=file,
        name=_name(file),
        model=model,
        source=source.source,
        path=_path(data, source.source, file),
        prompt=prompt or f"prompt   # TODO: one of {', '.join(row)}",
        answer=answer or "null",
        reward="exact_match" if answer else "task.py:reward",
        chat="false" if is_tiny else "true",
        replicas=2 if is_tiny else 1,
        response=64 if is_tiny else 1024,
        dtype="float32" if is_tiny else "bfloat16",
        compiled="false" if is_tiny else "true",
        rate="3.0e-4" if is_tiny else "1.0e-6",
    )
    file.write_text(text, encoding="utf-8")
    console.print(f"{file}: 'slipstream validate {file}' checks it", highlight=False)


def _write_example(folder: Path, *, force: bool) -> None:
    """Copy the example's files."""
    source = next(found for found in _EXAMPLE_FOLDERS if (found / _EXAMPLE[0]).exists())
    for name in _EXAMPLE:
        _refuse_if_there(folder / name, force=force)
    for name in _EXAMPLE:
        shutil.copyfile(source / name, folder / name)
    spec = folder / _EXAMPLE[0]
    console.print(f"{spec}: 'slipstream run {spec}' trains it here", highlight=False)


def _refuse_if_there(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        fail(f"{file} is there; name another one with --file, or say --force")
        raise typer.Exit(2)


def _kind(data: str) -> str:
    path, separator, _ = data.rpartition(":")
    if separator and path.endswith(".py"):
        return "python"
    return _KINDS.get(Path(data).suffix, "huggingface")


def _first_row(source: PromptSourceSpec) -> Row:
    """A row of the data; none of a Hugging Face id, which is not fetched for this."""
    if source.source == "huggingface":
        return {"prompt": "", "answer": ""}
    data = DataSpec(train=source, prompt_column="", answer_column=None)
    return open_source(source, data, key="data.train", has_columns=False)[0]


def _column(row: Row, known: Sequence[str]) -> str:
    return next((name for name in known if name in row), "")


def _path(data: str, source: str, file: Path) -> str:
    """The data as the specification names it: relative to its own folder."""
    if source == "huggingface":
        return data
    folder = file.resolve().parent
    path = Path(data).resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _name(file: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:63] or "run"
