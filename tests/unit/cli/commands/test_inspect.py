"""Tests of the terminal-safe and machine-readable output of the inspection commands."""

import json
import os
import shutil
from array import array

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.common.runspec.loader import canonical_json, parse_spec, spec_digest
from services.controller.rules.run_state import RunEvent
from services.controller.settings import DATABASE_FILE
from services.controller.store import ledgers
from services.controller.store.database import Database
from services.controller.store.records import NewRun, Note
from services.controller.store.runs import RunStore
from services.transferqueue.records.store import SampleRecord, SampleStore, store_path
from tests.helpers.rest import SPEC

# Window title, clear screen, clipboard (OSC 52), C1 CSI, right-to-left override, rich markup, controls.
HOSTILE = "a\x1b]0;title\x07\x1b[2J\x1b]52;c;eA==\x07\x9b31m\u202egnp.exe[bold]b[/nothing]:smile:\r\x08\x7f"
COLUMNS = {
    "response_ids": array("i", [5, 6]).tobytes(),
    "rollout_logprobs": array("f", [-0.5, -1.0]).tobytes(),
    "version_runs": array("i", [0, 2]).tobytes(),
}
OLD, NEW = (f"run_{number:032x}" for number in (1, 2))


def _create(database, run_id, name, *, labels=None):
    spec = parse_spec({**SPEC, "name": name})
    store = RunStore(database)
    store.create(
        NewRun(
            run_id=run_id,
            name=name,
            spec_json=canonical_json(spec),
            spec_digest=spec_digest(spec),
            labels=labels or {},
            created_by=HOSTILE,
        )
    )
    return store


def _train(store, run_id, step, reward):
    data = {"step": step, "reward_mean": reward, f"reward/{HOSTILE}": 1.0}

    def commit(connection):
        ledgers.begin_step(connection, run_id, step, version=step - 1, groups=[])
        ledgers.commit_step(connection, run_id, step, data)

    summary = {"advice": {"message": HOSTILE}}
    store.record(run_id, Note("StepCommitted", HOSTILE, data, step, step, summary), also=commit)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a state directory with two ended runs; the newer one has hostile text in each field."""
    state = tmp_path_factory.mktemp("state")
    database = Database(f"sqlite:///{state / DATABASE_FILE}")
    _create(database, OLD, "old")
    store = _create(database, NEW, "new", labels={"team": HOSTILE})
    for step in range(1, 11):
        _train(store, NEW, step, 1.0 if step < 8 else 0.0)
    for event in (RunEvent.ADMIT, RunEvent.READY, RunEvent.FAIL):
        store.apply(NEW, event, reason="Test", message=HOSTILE)
    database.close()
    logs = state / NEW / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer-0.log").write_text(f"{HOSTILE}\n")
    facts = {"group_id": "g1", "member": 0, "split": "train", "row": 1, "reward": 1.0}
    facts |= {"oldest_version": 0, "newest_version": 0, "finish_reason": "stop"}
    facts |= {"response_tokens": 2, "is_greedy": False}
    record = {"facts": facts, "prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE}
    record |= {"turns": [{"is_sampled": True, "text": HOSTILE, "num_tokens": 2}], "vocabulary": {}}
    SampleStore(store_path(state / "samples", NEW)).write(
        [SampleRecord(sample_id="g1.0", record=record, columns=COLUMNS)],
        max_bytes=1 << 30,
        max_steps=0,
    )
    return state


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """Returns a copy of the state directory."""
    monkeypatch.delenv("SLIPSTREAM_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return shutil.copytree(written, tmp_path / "state")


def look(folder, *arguments):
    return CliRunner().invoke(app, [*arguments, "--state-directory", str(folder)])


COMMANDS = {
    "list": ["list"],
    "get": ["get", NEW],
    "events": ["events"],
    "logs": ["logs"],
    "metrics": ["metrics"],
    "groups": ["groups"],
    "samples": ["samples", NEW],
    "list as JSON": ["list", "--json"],
    "events as JSON": ["events", "--json"],
    "metrics as JSON": ["metrics", "--json"],
    "samples as JSON": ["samples", NEW, "--json"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_nothing_that_a_run_wrote_reaches_the_terminal_as_a_command(folder, arguments):
    result = look(folder, *arguments)
    assert result.exit_code == 0, result.output
    assert result.output
    control_characters = {char for char in result.output if not char.isprintable() and char != "\n"}
    assert not control_characters


@pytest.mark.parametrize("name", ["list", "get", "logs", "samples"])
def test_runs_of_a_folder_that_is_not_writable_can_be_read(folder, monkeypatch, name):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    result = look(folder, *COMMANDS[name])
    assert result.exit_code == 0, result.output
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("arguments", [["events"], ["logs"], ["samples", NEW]], ids=str)
def test_markup_and_names_of_emoji_are_printed_as_they_are(folder, arguments):
    assert "[bold]b[/nothing]:smile:" in look(folder, *arguments).output


@pytest.mark.parametrize(
    ("arguments", "of"),
    [
        (["list", "--json"], lambda items: items[0]["labels"]["team"]),
        (["events", "--json", "--type", "StepCommitted"], lambda items: items[0]["message"]),
        (["samples", NEW, "--json"], lambda items: items[0]["response"]),
    ],
    ids=["list", "events", "samples"],
)
def test_json_holds_what_was_written(folder, arguments, of):
    lines = look(folder, *arguments).output.splitlines()
    assert of([json.loads(line) for line in lines]) == HOSTILE


def test_without_a_run_the_newest_is_meant(folder):
    assert look(folder, "events").output == look(folder, "events", "new").output
    assert look(folder, "metrics").output == look(folder, "metrics", NEW).output
    of_newest = look(folder, "metrics", "reward_mean")
    assert of_newest.output == look(folder, "metrics", "new", "reward_mean").output
    assert len(of_newest.output.splitlines()) == 10
    steps = look(folder, "metrics", "--json").output.splitlines()
    assert json.loads(steps[9])["reward_mean"] == 0.0
    assert look(folder, "metrics", "nobody").exit_code == 1
    assert look(folder, "metrics", "new", "no_such_number").exit_code == 1
    assert (
        look(folder, "events", "").exit_code == 2
    )  # an empty run id, as if $(slipstream submit) failed


def test_a_folder_without_runs_is_named(folder, tmp_path):
    result = look(tmp_path / "empty", "list")
    assert result.exit_code == 1
    assert "empty" in result.output
