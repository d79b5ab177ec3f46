"""Tests of database backups during use, and of restores while no controller uses the database."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.controller.store.database import Database
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from services.controller.store.usage import expect, in_use
from services.extras.backup.copies import backup, restore


def add_run(database: Database, digit: str) -> None:
    run_id = "run_" + digit * 32
    new = NewRun(run_id=run_id, name=f"copied-{digit}", spec_json="{}", spec_digest="")
    RunStore(database).create(new)


def runs_in(path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [run_id[-1] for (run_id,) in connection.execute("SELECT run_id FROM runs")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "slipstream.db"


@pytest.fixture
def live(path):
    path.parent.mkdir()
    opened = Database(f"sqlite:///{path}")
    add_run(opened, "1")
    yield opened
    opened.close()


def test_a_copy_of_a_live_database_has_what_is_only_in_its_log(live, path, tmp_path):
    shutil.copy(path, tmp_path / "plain.db")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        runs_in(tmp_path / "plain.db")
    copy = tmp_path / "copy.db"
    assert backup(path, copy) == 1
    add_run(live, "2")
    assert backup(path, copy) == 2
    assert sorted(runs_in(copy)) == ["1", "2"]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.glob("copy*")] == ["copy.db"]


def test_a_copy_is_put_back_without_the_log_of_what_it_replaces(live, path, tmp_path):
    copy = tmp_path / "copy.db"
    backup(path, copy)
    add_run(live, "2")
    live.close()
    stale = path.with_name("slipstream.db-wal")
    stale.write_bytes(b"log of another database")
    with pytest.raises(FailedPreconditionError, match="--force"):
        restore(copy, path, overwrite=False)
    assert restore(copy, path, overwrite=True) == 1
    assert not stale.exists()
    again = Database(f"sqlite:///{path}")
    add_run(again, "3")
    again.close()
    assert sorted(runs_in(path)) == ["1", "3"]


def test_nothing_is_put_back_while_a_controller_uses_the_database(live, path, tmp_path):
    copy = tmp_path / "copy.db"
    backup(path, copy)
    used = pytest.raises(FailedPreconditionError)
    with in_use(path), in_use(path), used:
        restore(copy, path, overwrite=True)
    assert restore(copy, path, overwrite=True) == 1


@pytest.mark.parametrize("damage", ["half", "text", "empty"])
def test_what_is_no_whole_copy_replaces_nothing(live, path, tmp_path, damage):
    copy = tmp_path / "copy.db"
    backup(path, copy)
    whole = copy.read_bytes()
    copy.write_bytes(
        {"half": whole[: len(whole) // 2], "text": b"runs" * 4096, "empty": b""}[damage]
    )
    with pytest.raises(InvalidArgumentError, match=r"copy\.db"):
        restore(copy, path, overwrite=True)
    assert runs_in(path) == ["1"]
    assert sorted(file.name for file in path.parent.glob("*.unfinished")) == []


def test_the_commands_say_what_they_copied_and_why_not(live, path, tmp_path):
    def said(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "500"})
        return done.exit_code, done.output

    copy, state = tmp_path / "copy.db", ("--state-directory", path.parent)
    assert said("backup", copy, *state) == (0, f"{copy}: 1 run\n")
    code, output = said("restore", copy, *state)
    assert code == 1
    assert "--force" in output
    assert said("restore", copy, *state, "--force") == (0, f"{path}: 1 run\n")
    code, output = said("backup", copy, "--state-directory", tmp_path / "elsewhere")
    assert code == 1
    assert f"{tmp_path / 'elsewhere' / 'slipstream.db'}" in output


def test_runs_without_their_database_are_not_forgotten(live, path):
    expect(path)
    logs = path.parent / ("run_" + "1" * 32) / "logs"
    logs.mkdir(parents=True)
    expect(path)
    live.close()
    path.write_bytes(b"")
    with pytest.raises(FailedPreconditionError, match=r"slipstream\.db is empty"):
        expect(path)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(FailedPreconditionError, match="is damaged"):
        expect(path)
    path.unlink()
    with pytest.raises(FailedPreconditionError, match=r"is missing.*run_1"):
        expect(path)


def test_a_folder_that_only_followed_a_run_expects_no_database(path):
    (path.parent / ("run_" + "1" * 32)).mkdir(parents=True)
    expect(path)
