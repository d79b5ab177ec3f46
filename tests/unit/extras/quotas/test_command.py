"""Tests of the command that sets the quotas of projects."""

from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from services.controller.manager.quotas import quota_of
from services.controller.settings import Limits
from services.controller.store.database import Database
from services.extras.quotas.command import app

DEFAULTS = Limits(max_active_runs=16, max_queued_runs=1000)


@pytest.fixture
def projects(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_TRANSFERQUEUE_ADDRESS", "127.0.0.1:9")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def limits_of(tmp_path, project):
    database = Database(f"sqlite:///{tmp_path / 'slipstream.db'}")
    try:
        return quota_of(database, project, DEFAULTS).limits
    finally:
        database.close()


def test_a_projects_limits_are_set_listed_and_reset(projects, tmp_path):
    limits = Limits(
        max_active_runs=2,
        max_queued_runs=9,
        max_gpus=64,
        max_transferqueue_bytes=1 << 40,
        max_checkpoint_bytes=1 << 41,
        max_requests_per_second=50,
        max_event_streams=20,
    )
    options = [f"--{name.replace('_', '-')}={limit}" for name, limit in asdict(limits).items()]
    assert projects("set", "blue", *options).exit_code == 0
    assert limits_of(tmp_path, "blue") == limits
    assert limits_of(tmp_path, "red") == DEFAULTS
    listed = projects("list").output
    assert listed.startswith("blue\tmax_active_runs 2\t")
    assert "max_gpus 64" in listed
    projects("reset", "blue")
    assert limits_of(tmp_path, "blue") == DEFAULTS
