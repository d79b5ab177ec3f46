"""Tests that the generated client matches the API's description."""

import inspect
import json
import re

from services.controller.api.operations import OPERATIONS
from services.controller.api.run_api import handler_name
from slipstream_client import AsyncClient, Client
from slipstream_client.async_client import AsyncRun
from slipstream_client.sync_client import Run
from tests.helpers.cli import REPOSITORY

DESCRIPTION = REPOSITORY / "docs" / "openapi.json"
PACKAGE = REPOSITORY / "services" / "client" / "slipstream_client"


def test_every_operation_is_a_method_unless_it_is_a_stream_of_events():
    names = {handler_name(operation) for operation in OPERATIONS if operation.form != "events"}
    assert names - set(dir(Client)) == names - set(dir(AsyncClient)) == set()


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    assert arguments_of(AsyncClient) == arguments_of(Client)
    asynchronous, synchronous = arguments_of(AsyncRun), arguments_of(Run)
    asynchronous["__init__"] = synchronous["__init__"]  # only the clients create runs
    assert asynchronous == synchronous


def arguments_of(kind: type) -> dict[str, list[str]]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        re.sub("^(__)?a(close|enter|exit)", r"\1\2", name): list(
            inspect.signature(method).parameters
        )
        for name, method in methods
        if name.startswith("__") or not name.startswith("_")
    }


def test_the_client_needs_nothing_of_slipstream():
    imported = {
        match[1]
        for path in PACKAGE.glob("*.py")
        for match in re.finditer(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {"services", "slipstream"} & imported == set()
    assert imported >= {"httpx", "pydantic", "slipstream_client"}


def test_the_client_has_the_version_of_slipstream():
    version = json.loads(DESCRIPTION.read_text())["info"]["version"]
    for project in (REPOSITORY, PACKAGE.parent):
        assert f'\nversion = "{version}"\n' in (project / "pyproject.toml").read_text()
