"""Tests that only leftovers of killed commands are removed at the next start."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.cli.state_directory import (
    find_token,
    known_token,
    process_folder,
    running_controllers,
)
from services.common.host import process_identity

# Each command creates a folder and a token, prints a line, and waits.
PROGRAM = """
import sys
from services.cli.state_directory import known_token, find_token, running_controllers
from services.cli.state_directory import process_folder
with process_folder() as folder, known_token(f"http://127.0.0.1:{sys.argv[1]}", "secret"):
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)


def begin(port: int) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def test_leftovers_of_killed_commands_are_removed_and_those_of_running_ones_stay():
    (killed, killed_folder), (living, living_folder) = begin(1), begin(2)
    try:
        killed.kill()
        killed.wait()
        assert killed_folder.is_dir()
        assert find_token("http://127.0.0.1:1") == "secret"
        with process_folder() as process_directory, known_token("http://127.0.0.1:3", "own"):
            assert not killed_folder.exists()
            assert find_token("http://127.0.0.1:1") == ""
            assert living_folder.is_dir()
            assert process_directory.is_dir()
            assert find_token("http://127.0.0.1:2") == "secret"
            assert find_token("http://127.0.0.1:3") == "own"
    finally:
        living.communicate()
    assert not living_folder.exists()
    assert find_token("http://127.0.0.1:2") == ""


@pytest.mark.parametrize("owner", ["nobody", "elsewhere", "unreadable"])
def test_files_that_may_be_in_use_stay(tmp_path, owner):
    folder = tmp_path / "TMPDIR" / "slipstream-foreign"
    folder.mkdir()
    ended_process = {**process_identity(), "start_time": 0.0}
    if owner != "nobody":
        text = (
            json.dumps({**ended_process, "host": "elsewhere"}) if owner == "elsewhere" else "pid 17"
        )
        (folder / "owner").write_text(text)
    with process_folder():
        assert folder.is_dir()
    (folder / "owner").write_text(json.dumps(ended_process))
    link = folder.with_name("slipstream-link")
    link.symlink_to(tmp_path)
    with process_folder():
        assert not folder.exists()
        assert link.is_symlink()


@pytest.mark.parametrize("text", ["slp_of_an_older_release", "[]", "{}", ""])
def test_an_unreadable_token_file_counts_as_missing(tmp_path, text):
    folder = tmp_path / "HOME" / ".slipstream" / "tokens"
    folder.mkdir(parents=True)
    (folder / "127.0.0.1:1").write_text(text)
    assert find_token("http://127.0.0.1:1") == ""


def test_controllers_that_run_here_are_known_by_their_addresses():
    assert running_controllers() == []
    with known_token("http://127.0.0.1:8700", "secret"):
        process, _ = begin(8701)
        assert running_controllers() == ["http://127.0.0.1:8700", "http://127.0.0.1:8701"]
        process.kill()
        process.wait()
        assert running_controllers() == ["http://127.0.0.1:8700"]
