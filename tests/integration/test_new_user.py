"""Tasks of a new user in a terminal, each in at most two commands."""

import os
import pty
import re
import subprocess
import sys

import pytest
import yaml

from tests.helpers.cli import command, environment
from tests.helpers.new_user import Terminal, write_task

pytestmark = pytest.mark.timeout(600)

USE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (each.from_pretrained(sys.argv[1]) for each in (AutoModelForCausalLM, AutoTokenizer))
written = model.generate(tokenizer("12=", return_tensors="pt")["input_ids"], max_new_tokens=2)
print(tokenizer.decode(written[0]).startswith("12="))
"""


@pytest.fixture
def spec(tmp_path):
    """Writes a new task to the folder in which commands run; returns its specification."""
    return write_task(tmp_path)


def closed(spec, *, once):
    """Runs a specification in a terminal, and closes the terminal once its output matches ``once``."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        command("run", spec),
        stdin=there,
        stdout=there,
        stderr=there,
        cwd=spec.parent,
        env=environment() | {"TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=lambda: os.login_tty(there),
    )
    os.close(there)
    output = ""
    while not re.search(once, output):
        output += os.read(here, 1 << 16).decode(errors="replace")
    os.close(here)
    return process.wait(120)


def test_a_wrong_column_is_named_with_the_columns_there_are(spec):
    document = yaml.safe_load(spec.read_text())
    document["data"]["answer_column"] = "anwser"
    spec.write_text(yaml.safe_dump(document))
    result = Terminal(spec.parent).tries("validate", spec)
    assert result.code == 2
    assert "data.answer_column" in result.err
    assert "answer" in result.err.replace("anwser", "")


def test_a_closed_terminal_loses_nothing_and_the_model_is_taken_away(spec, tmp_path):
    assert closed(spec, once=r"\b([3-9]|1\d)/24") == 130
    resuming = Terminal(spec.parent)
    result = resuming.slipstream("run", spec)
    assert re.search(r"was paused after step ([3-9]|\d\d); resuming it", result.out), result.out
    # No controller runs any more.
    taking = Terminal(spec.parent)
    taking.slipstream("export", "digits", tmp_path / "model")
    taking.count()
    used = subprocess.run(
        [sys.executable, "-c", USE, tmp_path / "model"], capture_output=True, text=True, check=False
    )
    assert used.stdout == "True\n", used.stderr
    assert "SUCCEEDED" in Terminal(spec.parent).slipstream("get", "digits").out
    assert "reward/style" in Terminal(spec.parent).slipstream("metrics", "digits").out
    refused = Terminal(spec.parent).tries("resume", "digits")
    assert refused.code == 1
    assert "slipstream up" in refused.err
