"""Tests that unread output does not block a command."""

import asyncio
import os
import subprocess
import sys

import pytest
import typer
from rich.console import Console

from services.cli import output
from services.cli.api_calls import run_until_signal
from services.cli.output import escaping_descriptors, tolerate_broken_pipe

MORE_THAN_A_PIPE_HOLDS = "x" * (1 << 20)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_a_writer_does_not_wait_for_a_reader(pipe):
    reader, writer = pipe
    console = Console(file=writer, width=80)
    with tolerate_broken_pipe(console):
        console.file.write(MORE_THAN_A_PIPE_HOLDS + "\n")
        console.print("the end")
        output = os.read(reader.fileno(), 1)  # the reader starts only after the writer has returned
        while not output.endswith(b"the end\n"):
            output += os.read(reader.fileno(), 1 << 16)
    assert output.decode() == MORE_THAN_A_PIPE_HOLDS + "\nthe end\n"
    assert console.file is writer


def test_a_command_that_is_ended_does_not_wait_for_its_reader(pipe):
    _, writer = pipe
    console = Console(file=writer)
    with pytest.raises(KeyboardInterrupt), tolerate_broken_pipe(console):
        console.file.write(MORE_THAN_A_PIPE_HOLDS + "\n")
        raise KeyboardInterrupt


def test_a_reader_that_is_gone_ends_the_command(pipe):
    reader, writer = pipe
    reader.close()
    console = Console(file=writer)
    with pytest.raises(BrokenPipeError), tolerate_broken_pipe(console):
        while True:
            console.file.write("one more line\n")


def test_a_closed_reader_does_not_fail_a_command(pipe, monkeypatch):
    reader, writer = pipe
    reader.close()
    monkeypatch.setattr(output.console, "_file", writer)

    async def work():
        while True:
            output.console.print("one more line")
            await asyncio.sleep(0)

    with pytest.raises(typer.Exit) as ended:
        run_until_signal(work())
    assert ended.value.exit_code == 0
    with output.console.capture() as captured:
        output.console.print("the next command")
    assert captured.get() == "the next command\n"


def test_what_a_tried_function_prints_is_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b]52;c;eA==\u202e [bold]b\n"
    with escaping_descriptors():
        os.write(1, hostile.encode())
        subprocess.run([sys.executable, "-c", f"print({hostile!r}, end='')"], check=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "a\\u001b]52;c;eA==\\u202e [bold]b\n" * 2


def test_an_output_without_a_character_gets_its_escape() -> None:
    code = "from services.cli.output import console; console.print('é 目')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
    )
    assert process.stdout == b"\\xe9 \\u76ee\n"
