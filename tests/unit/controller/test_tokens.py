"""Tests of the command that creates tokens on the controller's host."""

import pytest
from typer.testing import CliRunner

from services.common.errors import UnauthenticatedError
from services.controller.api.principals import Principal, TokenStore
from services.controller.store.database import Database
from services.controller.tokens import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_TRANSFERQUEUE_ADDRESS", "127.0.0.1:1")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_a_token_is_made_listed_and_revoked(run, tmp_path):
    token = run("create", "ann", "--project", "blue", "--role", "viewer").output.strip()
    tokens = TokenStore(Database(f"sqlite:///{tmp_path / 'slipstream.db'}"))
    principal = tokens.authenticate(f"Bearer {token}")
    assert principal == Principal(name="ann", project="blue", role="viewer")
    listed = run("list").output
    assert "ann\tblue\tviewer\texpires never" in listed
    assert token not in listed
    assert "1 revoked" in run("revoke", "ann").output
    with pytest.raises(UnauthenticatedError):
        tokens.authenticate(f"Bearer {token}")


def test_a_role_that_does_not_exist_is_refused(run):
    refused = run("create", "ann", "--project", "blue", "--role", "owner")
    assert refused.exit_code != 0
    assert "viewer, operator or admin" in refused.output
