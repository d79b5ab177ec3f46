"""Tests of the list of commands, of ``slipstream init``, and of closed pipes."""

import inspect
import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from services.checks.start.memory import run_memory
from services.cli.command import COMMANDS
from services.cli.main import _COMMANDS, app, load
from services.common.models.configs import preset_names
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec, RunSpec
from services.extras.init import command as init
from tests.helpers.configs import qwen_7b

SUMMARIES = {
    **{name: summary for panel in _COMMANDS.values() for name, (_, summary) in panel.items()},
    **{name: command.summary for name, command in COMMANDS.items()},
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_command_list_matches_each_commands_help(name):
    assert inspect.getdoc(load(name).callback).splitlines()[0] == SUMMARIES[name]


def test_a_specification_to_begin_with_is_valid_as_it_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "solution": "2", "level": 1}\n')
    file = tmp_path / "my_task.yaml"
    arguments = ["tiny:qwen2-0.4m", str(tmp_path / "rows.jsonl"), "--file", str(file)]
    result = CliRunner().invoke(app, ["init", *arguments])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(file.read_text())
    assert document["name"] == "my-task"
    assert document["data"]["train"] == {"source": "jsonl", "path": "rows.jsonl"}
    columns = [document["data"][key] for key in ("prompt_column", "answer_column")]
    assert columns == ["question", "solution"]
    assert CliRunner().invoke(app, ["validate", str(file)]).exit_code == 0
    # existing files are not overwritten
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 2
    unknown = CliRunner().invoke(app, ["init", "tiny:gone", *arguments[1:], "--force"])
    assert unknown.exit_code == 2
    assert yaml.safe_load(file.read_text()) == document


@pytest.mark.parametrize("preset", preset_names())
def test_a_first_specification_of_every_preset_is_valid(tmp_path, preset):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    file = tmp_path / "new" / "run.yaml"
    arguments = [preset, str(tmp_path / "rows.jsonl"), "--file", str(file)]
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 0
    checked = CliRunner().invoke(app, ["validate", str(file)])
    assert checked.exit_code == 0, checked.output


def test_the_example_is_written_to_the_named_file(tmp_path):
    def made(name, *arguments):
        return CliRunner().invoke(
            app, ["init", "--example", *arguments, "--file", str(tmp_path / name)]
        )

    assert made("new/first.yaml").exit_code == 0
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"first.yaml", "sort4.py"}
    checked = CliRunner().invoke(app, ["validate", str(tmp_path / "new" / "first.yaml")])
    assert checked.exit_code == 0, checked.output
    assert made("new/second.yaml").exit_code == 2  # sort4.py already exists
    assert not (tmp_path / "new" / "second.yaml").exists()
    assert made("other/first.yaml", "search").exit_code == 2  # the command offers only one example
    assert not (tmp_path / "other").exists()


GSM8K = "Half of 4 is 4/2 = <<4/2=2>>2.\n#### 2"
BOXED = r"Half of 4 is $\boxed{2}$."


@pytest.mark.parametrize(
    ("answer", "reward", "word"),
    [(GSM8K, "math_verify", "####"), (BOXED, "math_verify", r"\boxed{}"), ("2", "exact_match", "")],
)
@pytest.mark.parametrize(("gpus", "dtype"), [("", "float32"), ("0", "bfloat16")])
def test_a_first_specification_suits_the_answers_and_the_machine(
    tmp_path, monkeypatch, answer, reward, word, gpus, dtype
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text(3 * (json.dumps({"question": "Half of 4?", "answer": answer}) + "\n"))
    result = CliRunner().invoke(app, ["init", "org/model", str(rows), "--file", str(file)])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(file.read_text())
    assert document["rollout"]["rewards"] == [{"name": reward}]
    assert word in document["data"].get("prompt_template", "")
    trainer = document["trainer"]
    assert (trainer["dtype"], trainer["compile"]) == (dtype, dtype == "bfloat16")
    assert trainer["prompts_per_step"] == 3


def test_a_first_specification_fits_the_gpu_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(init, "gpu_bytes_here", lambda: 79 * 10**9)
    config = qwen_7b()
    config.save_pretrained(tmp_path / "model")
    load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")).save(tmp_path / "model")
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text(3 * '{"question": "1+1", "answer": "2"}\n')
    arguments = [str(tmp_path / "model"), str(rows), "--file", str(file)]
    result = CliRunner().invoke(app, ["init", *arguments])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(file.read_text())
    spec = RunSpec.model_validate(document)
    assert not run_memory(spec, config, gpu_bytes=79 * 10**9, gpus=1).why_not
    monkeypatch.setattr(init, "gpu_bytes_here", lambda: 500 * 10**9)
    CliRunner().invoke(app, ["init", *arguments, "--force"])
    assert document["trainer"].keys() > yaml.safe_load(file.read_text())["trainer"].keys()
    monkeypatch.setattr(init, "gpu_bytes_here", lambda: 48 * 10**9)
    CliRunner().invoke(app, ["init", *arguments, "--force"])
    trainer = RunSpec.model_validate(yaml.safe_load(file.read_text())).trainer
    assert trainer.lora is not None
    assert trainer.lora.target_modules is None
    assert trainer.optimizer.learning_rate == 1e-4


_INJECTION = 'question\n  curriculum: {function: "evil:f"}\n  # '


@pytest.mark.parametrize(
    "text",
    [
        _INJECTION,
        *(_INJECTION.replace("\n", line_break) for line_break in "\r\x85\u2028\u2029"),
        "a, curriculum: {function: evil}",
        "x: &a [*a]",
        "'\"#{}[]",
        "yes",
        "1e-3",
        "1:30",
        "null",
        " !!python/object/apply:os.system ['true']",
    ],
)
def test_a_name_in_data_or_a_path_is_a_value_and_nothing_else(tmp_path, text):
    usual = _document_made(tmp_path, "question", "rows")
    columns = (f"{text} answer", text)
    for column, other in (("question", columns[0]), (columns[1], "question")):
        document = _document_made(tmp_path, column, "rows", other)
        assert _keys(document) == _keys(usual)
    name = text.replace("/", "-")
    document = _document_made(tmp_path, "question", name)
    assert _keys(document) == _keys(usual)
    assert document["data"]["train"]["path"] == f"{name}.jsonl"


def test_a_model_or_a_hub_id_is_a_value_and_nothing_else(tmp_path):
    file = tmp_path / f"run{_INJECTION.replace('/', '-')}.yaml"
    result = CliRunner().invoke(app, ["init", _INJECTION, f"ds{_INJECTION}", "--file", str(file)])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(file.read_text())
    assert document["model"] == {"path": _INJECTION}
    assert document["data"]["train"]["path"] == f"ds{_INJECTION}"
    assert "curriculum" not in document["data"]


def _document_made(folder, column, name, *others):
    """Returns the specification that ``init`` writes for rows with these columns."""
    rows, file = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    rows.write_text(json.dumps({column: "1+1", **dict.fromkeys(others, "2"), "answer": "2"}))
    arguments = ["tiny:qwen2-0.4m", str(rows), "--file", str(file), "--force"]
    result = CliRunner().invoke(app, ["init", *arguments])
    assert result.exit_code == 0, result.output
    return yaml.safe_load(file.read_text())


def _keys(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix}
    return {name for key, inner in value.items() for name in _keys(inner, f"{prefix}.{key}")}


def test_a_closed_pipe_ends_the_command_quietly():
    command = f"{sys.executable} -m services.cli.main --help | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""


@pytest.mark.parametrize("names", [("a\udcffb", "rows.jsonl"), ("org/model", "a\udcffb.jsonl")])
def test_init_refuses_names_that_are_no_text(tmp_path, names):
    result = CliRunner().invoke(app, ["init", *names, "--file", str(tmp_path / "run.yaml")])
    assert result.exit_code == 2
    assert "Unicode" in result.output


@pytest.mark.parametrize(
    ("prompt", "is_rendered"),
    [
        ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", True),
        ("<s>[INST] 1+1= [/INST]", True),
        ("<start_of_turn>user\n1+1=<end_of_turn>\n<start_of_turn>model\n", True),
        ("<|turn>user\n1+1=<turn|>\n<|turn>model\n", True),
        ("<SPECIAL_11>User\n1+1=\n<SPECIAL_11>Assistant\n", True),
        ("<extra_id_1>User\n1+1=\n<extra_id_1>Assistant\n", True),
        ("<reserved_106>1+1=<reserved_107>", True),
        ("1+1=", False),
        ("Answer in <answer> tags: 1 < 2 | 3 > 1", False),
    ],
)
def test_init_applies_no_template_to_prompts_that_one_has_rendered(tmp_path, prompt, is_rendered):
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    result = CliRunner().invoke(app, ["init", "org/model", str(rows), "--file", str(file)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(file.read_text())["data"]["chat_template"] is not is_rendered


def test_init_writes_the_source_of_a_csv_file(tmp_path):
    rows, file = tmp_path / "rows.csv", tmp_path / "run.yaml"
    rows.write_text("question;answer\n1+1;2\n")
    result = CliRunner().invoke(app, ["init", "tiny:qwen2-0.4m", str(rows), "--file", str(file)])
    assert result.exit_code == 0, result.output
    data = yaml.safe_load(file.read_text())["data"]
    assert data["train"] == {"source": "csv", "path": "rows.csv"}
    assert (data["prompt_column"], data["answer_column"]) == ("question", "answer")


_CHAT = [{"role": "user", "content": "1+1"}]
_TOLD = [*_CHAT, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "changes", "steps"),
    [
        ({"prompt": _CHAT, "answer": "2"}, {"data.chat_template": True}, []),
        (
            {"prompt": _CHAT, "reward_model": {"ground_truth": "2"}},
            {"data.answer_column": "reward_model.ground_truth", "rollout.rewards": "exact_match"},
            [],
        ),
        (
            {
                "problem": "Add 1.",
                "solutions": [],
                "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
            },
            {"data.answer_column": "input_output", "rollout.rewards": "code_tests"},
            [],
        ),
        (
            {"prompt": "Add 1.", "test_list": ["assert f(1) == 2"], "solution": "def f(x): ..."},
            {"data.answer_column": "test_list", "rollout.rewards": "code_tests"},
            [],
        ),
        (
            {"messages": _TOLD},
            {"algorithm": {"loss": "sft"}, "data.answer_column": None, "rollout.rewards": None},
            [],
        ),
        (
            {"prompt": "1+1", "chosen": "2", "rejected": "3"},
            {"algorithm": {"loss": "dpo"}, "rollout.rewards": None},
            [],
        ),
        ({"prompt": "Write."}, {"rollout.rewards": "task.py:reward"}, ["task.py"]),
        ({"text": "a", "level": 3}, {}, ["one of 'text', 'level'", "task.py"]),
    ],
    ids=["chat", "verl", "apps", "mbpp", "sft", "dpo", "no answer", "no prompt"],
)
def test_init_knows_tasks_by_their_columns_and_names_the_steps_that_are_left(
    tmp_path, row, changes, steps
):
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["init", "tiny:qwen2-0.4m", str(rows), "--file", str(file)])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(file.read_text())
    for key, expected in changes.items():
        section, _, name = key.partition(".")
        value = document[section].get(name) if name else document[section]
        assert (value[0]["name"] if name == "rewards" and value else value) == expected
    lines = " ".join(result.output.split()).split("before that, ")[1:]
    assert len(lines) == len(steps)
    for line, step in zip(lines, steps, strict=True):
        assert step in line
    if not steps:
        checked = CliRunner().invoke(app, ["validate", str(file)])
        assert checked.exit_code == 0, checked.output
