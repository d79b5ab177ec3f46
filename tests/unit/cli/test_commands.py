"""The command line as a whole: its commands and their startup cost."""

import inspect
import json
import subprocess
import sys

import pytest
import yaml
from transformers import Qwen2Config
from typer.testing import CliRunner

from services.cli.commands import init
from services.cli.main import _COMMANDS, app, load
from services.cli.run_memory import run_memory
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec, RunSpec

SUMMARIES = {name: summary for panel in _COMMANDS.values() for name, (_, summary) in panel.items()}


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_command_list_matches_each_commands_help(name):
    assert inspect.getdoc(load(name).callback).splitlines()[0] == SUMMARIES[name]


def test_a_specification_to_begin_with_is_valid_as_it_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "solution": "2", "level": 1}\n')
    file = tmp_path / "my_task.yaml"
    arguments = ["tiny:qwen2-0.4m", str(tmp_path / "rows.jsonl"), "--file", str(file)]
    made = CliRunner().invoke(app, ["init", *arguments])
    assert made.exit_code == 0, made.output
    document = yaml.safe_load(file.read_text())
    assert document["name"] == "my-task"
    assert document["data"]["train"] == {"source": "jsonl", "path": "rows.jsonl"}
    columns = [document["data"][key] for key in ("prompt_column", "answer_column")]
    assert columns == ["question", "solution"]
    assert CliRunner().invoke(app, ["validate", str(file)]).exit_code == 0
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 2  # nothing is overwritten
    unknown = CliRunner().invoke(app, ["init", "tiny:gone", *arguments[1:], "--force"])
    assert unknown.exit_code == 2
    assert yaml.safe_load(file.read_text()) == document


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
    made = CliRunner().invoke(app, ["init", "org/model", str(rows), "--file", str(file)])
    assert made.exit_code == 0, made.output
    document = yaml.safe_load(file.read_text())
    assert document["rollout"]["rewards"] == [{"name": reward}]
    assert word in document["data"].get("prompt_template", "")
    trainer = document["trainer"]
    assert (trainer["dtype"], trainer["compile"]) == (dtype, dtype == "bfloat16")
    assert trainer["prompts_per_step"] == 3


def test_a_first_specification_fits_the_gpu_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(init, "gpu_bytes_here", lambda: 79 * 10**9)
    config = Qwen2Config(  # Qwen2.5-7B's shape
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    config.save_pretrained(tmp_path / "model")
    load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")).save(tmp_path / "model")
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text(3 * '{"question": "1+1", "answer": "2"}\n')
    arguments = [str(tmp_path / "model"), str(rows), "--file", str(file)]
    made = CliRunner().invoke(app, ["init", *arguments])
    assert made.exit_code == 0, made.output
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


def test_a_closed_pipe_ends_the_command_quietly():
    command = f"{sys.executable} -m services.cli.main --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
