"""Tests that a second command in a state directory fails with an error that names the first one."""

import subprocess
import sys

import pytest

from services.cli.state_directory import StateInUseError, lock_state_directory

PROGRAM = """
import sys
from pathlib import Path
from services.cli.state_directory import lock_state_directory
with lock_state_directory(Path(sys.argv[2])):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_a_second_command_gets_the_owner_of_the_folder(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "up", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout.readline() == "has it\n"
        who = rf"process {first.pid} \(slipstream up .*--state-directory"
        with pytest.raises(StateInUseError, match=who), lock_state_directory(tmp_path):
            pytest.fail("two have it")
    finally:
        first.kill()
        first.communicate()
    with (
        lock_state_directory(tmp_path),
        pytest.raises(StateInUseError),
        lock_state_directory(tmp_path),
    ):
        pytest.fail("two have it")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StateInUseError, match="--state-directory"),
        lock_state_directory(tmp_path / "file" / "runs"),
    ):
        pytest.fail("it is locked")
