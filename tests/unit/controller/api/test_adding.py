"""Tests of the endpoint that docs/adding.md adds."""

import pytest

from services.controller import schemas
from services.controller.api import handlers, operations, rest
from tests.helpers.pages import example
from tests.helpers.rest import client_of, open_manager


@pytest.fixture
def _added(tmp_path, monkeypatch):
    """Adds the operation of docs/adding.md to the API for one test."""

    def block(name, module):
        names = dict(vars(module))
        exec(example("adding.md", name, tmp_path).read_text(), names)
        return names

    view = block("schemas.py", schemas)["LoadView"]
    monkeypatch.setattr(operations, "LoadView", view, raising=False)
    operation = block("operations.py", operations)["GetLoad"]
    monkeypatch.setattr(operations, "GetLoad", operation, raising=False)
    monkeypatch.setattr(handlers, "LoadView", view, raising=False)
    method = block("handlers.py", handlers)["Handlers"].get_load
    monkeypatch.setattr(handlers.Handlers, "get_load", method, raising=False)
    monkeypatch.setattr(rest, "OPERATIONS", (*operations.OPERATIONS, operation))


@pytest.mark.usefixtures("_added")
async def test_the_endpoint_of_the_page_answers_and_is_described(database, tmp_path):
    async with (
        open_manager(database, max_active_runs=4) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        answer = await api.get("/v1/load")
        assert (answer.status_code, answer.json()) == (200, {"active_runs": 0.0})
        described = (await api.get("/openapi.json")).json()
        assert "get" in described["paths"]["/v1/load"]
