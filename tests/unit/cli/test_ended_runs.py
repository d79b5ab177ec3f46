"""Tests of commands on a state directory whose controller has ended."""

import json
import shutil
from contextlib import closing

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from services.cli import api_calls
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
