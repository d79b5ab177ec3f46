"""The command line as a whole: which commands there are, and what they cost."""

import inspect
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.main import _COMMANDS, app, load

SUMMARIES = {name: summary for panel in _COMMANDS.values() for name, (_, summary) in panel.items()}


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_of_commands_says_of_each_what_it_says_of_itself(name):
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


def test_who_reads_no_more_ends_the_command_quietly():
    command = f"{sys.executable} -m services.cli.main --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
