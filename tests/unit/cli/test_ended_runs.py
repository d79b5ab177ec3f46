"""Tests of commands on a state directory whose controller has ended."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from services.cli import api_calls, ended_runs
from services.cli.main import app
from services.controller.run.train.checkpoints import CheckpointStore, relocate_checkpoints
from services.controller.settings import DATABASE_FILE
from services.controller.store.database import Database
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from services.controller.store.tables import CHECKPOINTS
from services.transferqueue.records.store import SampleStore, store_path
from tests.helpers.specs import changed
from tests.unit.transferqueue.test_sample_store import NO_BOUND, made

IDS = [f"run_0198{digit * 28}" for digit in "ab"]


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Creates a state directory with two ended runs, ``first`` and ``second``, samples and checkpoints."""
    monkeypatch.setattr(api_calls, "running_controllers", list)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    folder.mkdir()
    with closing(Database(f"sqlite:///{folder / DATABASE_FILE}")) as database:
        for number, (run_id, name) in enumerate(zip(IDS, ("first", "second"), strict=True)):
            spec = json.dumps(changed(name=name))
            RunStore(database).create(
                NewRun(run_id=run_id, name=name, spec_json=spec, spec_digest="d")
            )
            path = folder / run_id / "checkpoints" / "step-2"
            path.mkdir(parents=True)
            values = {"checkpoint_id": f"ckpt_{number}", "run_id": run_id, "step": 2}
            values |= {"weight_version": 2, "path": str(path), "state": "READY"}
            values |= {"message": "", "create_time": 0.0}
            with database.write_unfenced() as connection:
                connection.execute(sa.insert(CHECKPOINTS).values(values))
            SampleStore(store_path(folder / "samples", run_id)).write([made(number)], **NO_BOUND)
    return folder


def said(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("name", ["first", "second", ""])
def test_commands_take_the_name_of_a_run_after_its_controller_has_ended(ended, name):
    arguments, number = ([name] if name else []), int(name != "first")
    (sample,) = said("samples", *arguments, "--json").splitlines()
    assert json.loads(sample)["prompt"] == f"prompt {number}"
    assert json.loads(said("get", *arguments))["id"] == IDS[number]
    assert f"ckpt_{number}" in said("checkpoints", *arguments)
    for command in ("events", "groups", "workers", "logs", "metrics"):
        said(command, *arguments)


def test_checkpoints_are_found_in_a_state_directory_that_was_moved(ended, tmp_path):
    moved = tmp_path / "elsewhere" / "state"
    moved.parent.mkdir()
    shutil.move(ended, moved)
    output = said("checkpoints", "first", "--state-directory", str(moved), "--json")
    assert json.loads(output)["path"] == str(moved / IDS[0] / "checkpoints" / "step-2")


def test_a_checkpoint_that_is_still_there_keeps_its_path(ended, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ended, copy)
    shutil.rmtree(ended / IDS[1])
    with closing(Database(f"sqlite:///{copy / DATABASE_FILE}")) as database:
        relocate_checkpoints(database, copy)
        paths = [CheckpointStore(database).list_checkpoints(run_id)[0].path for run_id in IDS]
    assert paths == [
        str(root / run_id / "checkpoints" / "step-2")
        for root, run_id in zip((ended, copy), IDS, strict=True)
    ]


def failed(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("content", [b"not a database" * 400, None], ids=["damaged", "folder"])
@pytest.mark.parametrize("command", ["list", "get", "checkpoints", "events"])
def test_a_database_that_cannot_be_read_is_named_with_a_fix(ended, content, command):
    for file in ended.glob(f"{DATABASE_FILE}*"):
        file.unlink()
    if content is None:
        (ended / DATABASE_FILE).mkdir()
    else:
        (ended / DATABASE_FILE).write_bytes(content)
    output = failed(command)
    assert output.startswith(f"error: runs/{DATABASE_FILE} cannot be read (")
    assert "slipstream restore" in output


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"url"'])
def test_an_address_that_is_being_written_is_no_address(ended, text):
    (ended / api_calls.UP_FILE).write_text(text)
    assert "second" in said("list")


def test_a_state_directory_of_another_user_is_named(ended, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(ended_runs, "Database", refuse)
    message = f"runs/{DATABASE_FILE} cannot be read (Permission denied); its owner can"
    assert message in failed("list")
    monkeypatch.setattr(Path, "read_text", refuse)
    assert failed("list").startswith(
        "error: runs cannot be read (Permission denied); its owner can"
    )


def test_a_checkpoint_whose_stored_path_cannot_be_read_is_found_in_the_moved_folder(ended):
    path = "/" + "x" * 300 + f"/{IDS[0]}/checkpoints/step-2"
    with closing(Database(f"sqlite:///{ended / DATABASE_FILE}")) as database:
        with database.write_unfenced() as connection:
            query = sa.update(CHECKPOINTS).where(CHECKPOINTS.c.run_id == IDS[0])
            connection.execute(query.values(path=path))
        relocate_checkpoints(database, ended)
        (checkpoint,) = CheckpointStore(database).list_checkpoints(IDS[0])
    assert checkpoint.path == str(ended / IDS[0] / "checkpoints" / "step-2")


def test_a_folder_for_an_export_that_cannot_be_read_is_named(ended):
    result = CliRunner().invoke(app, ["export", "first", "x" * 300])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "cannot be read (File name too long)" in result.output.replace("\n", " ")
