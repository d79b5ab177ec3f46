"""Output that nobody reads holds nobody up."""

import os

import pytest
from rich.console import Console

from services.cli.output import patient

MORE_THAN_A_PIPE_HOLDS = "x" * (1 << 20)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_a_writer_goes_on_although_nobody_reads_yet(pipe):
    reader, writer = pipe
    console = Console(file=writer, width=80)
    with patient(console):
        console.file.write(MORE_THAN_A_PIPE_HOLDS + "\n")
        console.print("the end")
        got = os.read(reader.fileno(), 1)  # only now
        while not got.endswith(b"the end\n"):
            got += os.read(reader.fileno(), 1 << 16)
    assert got.decode() == MORE_THAN_A_PIPE_HOLDS + "\nthe end\n"
    assert console.file is writer


def test_a_command_that_is_ended_does_not_wait_for_its_reader(pipe):
    _, writer = pipe
    console = Console(file=writer)
    with pytest.raises(KeyboardInterrupt), patient(console):
        console.file.write(MORE_THAN_A_PIPE_HOLDS + "\n")
        raise KeyboardInterrupt


def test_a_reader_that_is_gone_ends_the_command(pipe):
    reader, writer = pipe
    reader.close()
    console = Console(file=writer)
    with pytest.raises(BrokenPipeError), patient(console):
        while True:
            console.file.write("one more line\n")
