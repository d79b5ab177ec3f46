"""The ``init`` command: writes a commented specification for a model and a data set."""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from services.checks.start.machine import gpu_bytes_here, has_gpus, num_gpus
from services.cli.output import console, fail
from services.common.models.configs import preset_config, preset_names
from services.common.models.families import image_kind
from services.common.runspec.base import SpecPart
from services.common.runspec.data import DataSpec, PromptSourceSpec
from services.common.runspec.run import TINY_PREFIX, RunSpec
from services.extras.init.commented_yaml import Comments, commented_yaml
from services.rollout.data.sources import Row, column_value, has_column, open_source

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
_ANSWERS = (
    *("answer", "solution", "ground_truth", "reward_model.ground_truth", "target", "label"),
    "output",
)
# Tests of programs, as public data sets of programming tasks name them.
_TESTS = ("input_output", "test_list", "test_cases", "tests", "test", "unit_tests", "public_tests")
_EXAMPLE = ("sort4.yaml", "sort4.py")
# The examples are next to the package in the repository, and inside it when installed.
_EXAMPLE_FOLDERS = (Path(__file__).parents[3] / "examples", Path(__file__).parents[2] / "examples")
_OWN_REWARD = "task.py:reward"
_PROMPTS_PER_STEP = 32
# Rows that are examined for the form of their answers.
_MAX_ROWS = 16
_KINDS = {
    **dict.fromkeys((".jsonl", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}

_COMMENTS: Comments = {
    "model.path": ("a folder, a Hugging Face id, or a preset such as tiny:qwen2-0.4m",),
    "model.images": ("the model sees images",),
    "data.train": (
        "",
        "heldout: {source: ..., path: ..., limit: 200}   # prompts that are only evaluated, every",
        "                                                # validation.every (10) weight versions",
    ),
    "data.answer_column": ("what the reward compares with; null if it needs none",),
    "data.chat_template": ("whether prompts go through the tokenizer's chat template",),
    "data.max_prompt_tokens": ("a longer prompt is quarantined and counted",),
    "rollout.engine": ("vllm or sglang for real models on GPUs, once installed",),
    "rollout.replicas": ("rollout processes",),
    "rollout.group_size": ("responses per prompt",),
    "rollout.rewards": (
        "",
        "name: exact_match, math_verify, code_tests, a URL, or file.py:function. Your own function",
        "is called with (prompt, response, answer, row) and returns a number.",
    ),
    "algorithm.max_staleness": (
        "max weight versions that a sample may lag behind; 0 trains synchronously",
    ),
    "trainer.prompts_per_step": ("groups per batch",),
    "trainer.dtype": ("bfloat16 for GPUs; CPUs are faster in float32",),
    "trainer.compile": ("torch.compile: faster and less memory on GPUs, slower start",),
}
# Marks of roles, as chat templates write them: <|im_start|>, Gemma's <start_of_turn> and <|turn>, [INST],
# DeepSeek's, Nemotron's <SPECIAL_11> and <extra_id_1>, Baichuan's <reserved_106>.
_CONTROL = re.compile(
    r"<[|\uff5c][\w\u2581]+[|\uff5c]?>|<start_of_turn>|\[INST\]|<(?:SPECIAL|extra_id|reserved)_\d+>"
)
_UNFIT_COMMENT = ("else it does not fit on this GPU",)


def init(
    model: Annotated[str, typer.Argument(help="Folder, Hugging Face id or tiny: preset.")] = "",
    data: Annotated[
        str, typer.Argument(help="JSONL, Parquet or CSV file, file.py:function or Hugging Face id.")
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option(
            help="File to write the specification to. Default: run.yaml, or sort4.yaml with --example.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    example: Annotated[
        bool,
        typer.Option(
            "--example", help="Write the example sort4, with its code next to it, instead."
        ),
    ] = False,
) -> None:
    """Write a commented specification for a model and a data set."""
    if example == bool(model) or (model and not data):
        raise typer.BadParameter("expected MODEL and DATA, or --example without them")
    file = file or Path(_EXAMPLE[0] if example else "run.yaml")
    if example:
        with _writing(file):
            _write_example(file, force=force)
        return
    if model.startswith(TINY_PREFIX) and model not in preset_names():
        fail(f"MODEL {model!r} is not a known preset; use one of {', '.join(preset_names())}")
        raise typer.Exit(2)
    _refuse_if_there(file, force=force)
    if not (model + data).isprintable():
        try:
            (model + data).encode()
        except UnicodeEncodeError:
            fail("MODEL and DATA must be text of Unicode characters; rename the file")
            raise typer.Exit(2) from None
    source = PromptSourceSpec(source=_kind(data), path=data)
    try:
        rows = _first_rows(source)
    except (ValueError, OSError) as error:
        fail(str(error))
        raise typer.Exit(2) from None
    document = _document(file, model, source, rows)
    comments = {**_COMMENTS, "": _header(file)}
    if not _column(rows.first[0], _PROMPTS):
        comments["data.prompt_column"] = (f"TODO: one of {', '.join(rows.first[0])}",)
    if has_gpus() and Path(model).is_dir():
        comments |= _fit(document)
    text = commented_yaml(document, comments)
    with _writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    console.print(
        f"wrote {file}; `slipstream validate {shlex.quote(str(file))}` checks it", highlight=False
    )
    for step in _open_steps(document, rows, file):
        console.print(f"before that, {step}", highlight=False, markup=False)


def _open_steps(document: dict[str, Any], rows: "_Rows", file: Path) -> Iterator[str]:
    """Yields what the user has to add to the specification."""
    if not _column(rows.first[0], _PROMPTS):
        columns = ", ".join(map(repr, rows.first[0]))
        yield f"set data.prompt_column to the column with the prompts, one of {columns}"
    rewards = [reward["name"] for reward in document["rollout"].get("rewards", ())]
    if _OWN_REWARD in rewards and not file.with_name("task.py").exists():
        yield (
            f"write {file.with_name('task.py')} with a function reward(prompt, response, answer, row) that "
            "returns a number: no column of the data has answers"
        )


def _document(file: Path, model: str, source: PromptSourceSpec, rows: "_Rows") -> dict[str, Any]:
    """Returns the specification of a model and its first rows of data."""
    row, is_tiny = rows.first[0], model.startswith(TINY_PREFIX)
    prompt, task = _column(row, _PROMPTS), _task(rows)
    is_chat = all(isinstance(column_value(row, prompt), list) for row in rows.first)
    is_large = has_gpus() and not is_tiny
    return {
        "name": _name(file),
        "seed": 0,
        "model": {"path": model, **({"images": True} if is_tiny and _sees_images(model) else {})},
        "data": {
            "train": {"source": source.source, "path": _path(source.path, source.source, file)},
            "prompt_column": prompt or "prompt",
            **({} if task.loss == "dpo" else {"answer_column": task.answer or None}),
            **({"prompt_template": task.template} if task.template else {}),
            "chat_template": is_chat or (not is_tiny and not _are_rendered(rows, prompt)),
            "max_prompt_tokens": 1024,
        },
        "rollout": {
            **(
                {}
                if task.loss
                else {
                    "engine": "vllm" if is_large and find_spec("vllm") else "torch",
                    "replicas": 2 if is_tiny else 1,
                    "group_size": 8,
                }
            ),
            "max_response_tokens": 64 if is_tiny else 1024,
            **({"rewards": [{"name": task.reward}]} if task.reward else {}),
        },
        "algorithm": (
            {"loss": task.loss}
            if task.loss
            else {"advantage": "grpo", "loss": "ppo", "max_staleness": 1}
        ),
        "trainer": {
            "steps": 100,
            "prompts_per_step": min(_PROMPTS_PER_STEP, rows.count),
            "dtype": "bfloat16" if is_large else "float32",
            "compile": is_large,
            "optimizer": {"learning_rate": 3e-4 if is_tiny else 1e-6},
            "checkpoint": {"every": 20, "keep": 2},
        },
    }


@dataclass(frozen=True, slots=True)
class _Task:
    """Task of a data set's rows."""

    answer: str = ""
    """Column that the reward compares with; empty if there is none."""
    reward: str = ""
    template: str = ""
    loss: str = ""
    """Loss that learns the rows' own answers; empty if responses are sampled."""


def _task(rows: "_Rows") -> _Task:
    """Returns the task of preference pairs, conversations, programs or questions, by the columns."""
    row = rows.first[0]
    if "chosen" in row and "rejected" in row:
        return _Task(loss="dpo")
    if tests := _column(row, [name for name in _TESTS if row.get(name)]):
        return _Task(tests, "code_tests")
    if answer := _column(row, _ANSWERS):
        form = _answer_form([str(column_value(row, answer) or "") for row in rows.first])
        return _Task(answer, form.reward, form.template)
    if all(_has_answers(column_value(row, _column(row, _PROMPTS))) for row in rows.first):
        return _Task(loss="sft")
    return _Task(reward=_OWN_REWARD)


def _has_answers(prompt: object) -> bool:
    """Returns True for a conversation that the assistant ends."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _are_rendered(rows: "_Rows", prompt: str) -> bool:
    """Returns True if all prompts already have the control tokens of a chat template."""
    texts = [row.get(prompt) for row in rows.first]
    return all(isinstance(text, str) and _CONTROL.search(text) for text in texts)


def _sees_images(preset: str) -> bool:
    return image_kind(preset_config(preset, vocab_size=256, eos_id=0, pad_id=0)) is not None


def _header(file: Path) -> tuple[str, str]:
    name = shlex.quote(str(file))
    return (
        f"`slipstream validate {name}` checks this specification, `slipstream run {name}` trains it here.",
        "All keys, with types and defaults, are in docs/runspec.md.",
    )


def _fit(document: dict[str, Any]) -> Comments:
    """Changes a specification so that it fits on this machine's GPUs; returns comments of the changes."""
    # These import torch.
    from services.checks.start.hub import model_config
    from services.checks.start.memory import run_memory, smallest_change

    gpu_bytes = gpu_bytes_here()
    if gpu_bytes is None:
        return {}
    gpus = num_gpus()
    try:
        spec = RunSpec.model_validate(document)
        config = model_config(spec)
        if not run_memory(spec, config, gpu_bytes=gpu_bytes, gpus=gpus).why_not:
            return {}
        changes = smallest_change(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
    except ValueError as error:
        console.print(f"the memory is not planned: {error}", highlight=False)
        return {}
    comments: dict[str, Sequence[str]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = (
            value.model_dump(mode="json", exclude_defaults=True)
            if isinstance(value, SpecPart)
            else value
        )
        comments[key] = _UNFIT_COMMENT
    if "trainer.lora" in changes:
        document["trainer"]["optimizer"]["learning_rate"] = 1e-4
    return comments


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Reports that a file cannot be written."""
    try:
        yield
    except OSError as error:
        fail(f"{file}: cannot be written ({error.strerror}); choose another one with --file")
        raise typer.Exit(2) from None


def _write_example(file: Path, *, force: bool) -> None:
    """Copies the specification of the example to ``file``, and its code to the same folder."""
    source = next(
        example_folder
        for example_folder in _EXAMPLE_FOLDERS
        if (example_folder / _EXAMPLE[0]).exists()
    )
    code = file.with_name(_EXAMPLE[1])
    _refuse_if_there(file, force=force)
    if code.exists() and not force:
        fail(f"{code} exists; choose another folder with --file, or replace it with --force")
        raise typer.Exit(2)
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, copy in zip(_EXAMPLE, (file, code), strict=True):
        shutil.copyfile(source / name, copy)
    console.print(
        f"wrote {file} and {code}; 'slipstream run {file}' trains the example on this machine",
        highlight=False,
    )


def _refuse_if_there(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        fail(f"{file} exists; choose another one with --file, or replace it with --force")
        raise typer.Exit(2)


def _kind(data: str) -> str:
    path, separator, _ = data.rpartition(":")
    if separator and path.endswith(".py"):
        return "python"
    return _KINDS.get(Path(data).suffix, "huggingface")


@dataclass(frozen=True, slots=True)
class _Rows:
    """The first rows of a data set."""

    first: Sequence[Row]
    count: int
    """Number of rows of the whole set."""


def _first_rows(source: PromptSourceSpec) -> _Rows:
    """Reads the first rows; returns a stand-in for a Hugging Face id, which is not downloaded for this."""
    if source.source == "huggingface" and not Path(source.path).exists():
        return _Rows([{"prompt": "", "answer": ""}], _PROMPTS_PER_STEP)
    data = DataSpec(train=source, prompt_column="", answer_column=None)
    rows = open_source(source, data, key="data.train", has_columns=False)
    return _Rows([rows[index] for index in range(min(len(rows), _MAX_ROWS))], len(rows))


@dataclass(frozen=True, slots=True)
class _AnswerForm:
    """A form of expected answers, and the reward and template for it."""

    pattern: re.Pattern[str]
    reward: str
    template: str


_ASK = "{{prompt}}\nReason step by step and put the final answer {place}.\n"
_FORMS = (
    # GSM8K: a worked solution, then "#### 72".
    _AnswerForm(re.compile(r"####\s*\S"), "math_verify", _ASK.format(place="after ####")),
    # MATH and similar sets: a worked solution with "\boxed{72}".
    _AnswerForm(re.compile(r"\\boxed\s*\{"), "math_verify", _ASK.format(place="in \\boxed{}")),
)
_PLAIN = _AnswerForm(re.compile(""), "exact_match", "")


def _answer_form(answers: Sequence[str]) -> _AnswerForm:
    """Returns the form of the majority of answers."""
    for form in _FORMS:
        if 2 * sum(form.pattern.search(answer) is not None for answer in answers) > len(answers):
            return form
    return _PLAIN


def _column(row: Row, columns: Sequence[str]) -> str:
    return next((name for name in columns if has_column(row, name)), "")


def _path(data: str, source: str, file: Path) -> str:
    """Returns the data's path for the specification: relative to its folder if possible."""
    if source == "huggingface":
        return data
    folder = file.resolve().parent
    path = Path(data).resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _name(file: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:63] or "run"
