"""Tests that other users of the host cannot read what services store."""

import os
import stat
from contextlib import closing

import pytest

from services.cli.state_directory import lock_state_directory
from services.common.host import make_private
from services.controller import __main__ as controller
from services.controller.settings import ControllerSettings
from services.controller.store.database import Database
from services.controller.store.lease import Leadership
from services.transferqueue.records.store import _opened


@pytest.fixture(autouse=True)
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("is_old", [False, True])
async def test_the_controllers_database_and_its_journals_are_private(tmp_path, is_old):
    file = tmp_path / "slipstream.db"
    if is_old:
        file.touch(0o644)
    with closing(Database(f"sqlite:///{file}")) as database:
        await Leadership(database, holder="one", ttl_s=60).acquire()
        file_modes = modes(tmp_path)
    assert "slipstream.db" in file_modes
    assert set(file_modes.values()) == {0o600}


def test_the_samples_of_a_run_are_private(tmp_path):
    with _opened(tmp_path / "samples" / "run_1.db", is_new=True):
        assert set(modes(tmp_path / "samples").values()) == {0o600}


@pytest.mark.parametrize("program", ["controller", "transferqueue", "command"])
async def test_a_state_folder_is_private_whichever_program_creates_it(
    tmp_path, monkeypatch, program
):
    folder = tmp_path / "new" / "state"
    if program == "controller":

        def refuse(settings):
            raise ConnectionError

        monkeypatch.setattr(controller, "_opened_database", refuse)
        settings = ControllerSettings(transferqueue_address="127.0.0.1:1", state_directory=folder)
        with pytest.raises(ConnectionError):
            await controller.run_controller(settings)
    elif program == "transferqueue":
        with _opened(folder / "samples" / "run_1.db", is_new=True):
            assert stat.S_IMODE((folder / "samples").stat().st_mode) == 0o700
    else:
        with lock_state_directory(folder):
            pass
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_missing_file_is_not_created(tmp_path):
    make_private(tmp_path / "missing" / "file")
    assert not (tmp_path / "missing").exists()
