"""Fixtures of the controller's tests."""

import uuid
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import sqlalchemy as sa

from services.controller.manager.runs import RunManager
from services.controller.store.database import Database
from tests.helpers.databases import postgres_cluster
from tests.helpers.rest import client_of, open_manager


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str | None]:
    with postgres_cluster() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path, postgres_url) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    if postgres_url is None:
        pytest.skip("PostgreSQL is not installed")
    # A schema is made and removed in no time; a database is hundreds of files.
    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    yield f"{postgres_url}&options=-csearch_path%3D{name}"


@pytest.fixture
def database(database_url) -> Iterator[Database]:
    """An open database of this release."""
    opened = Database(database_url)
    yield opened
    opened.close()


@pytest.fixture
async def manager(database) -> AsyncIterator[RunManager]:
    """A manager whose runs wait for workers that never come."""
    async with open_manager(database) as manager:
        yield manager


@pytest.fixture
async def api(manager, database, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of that manager's REST API."""
    async with client_of(manager, database, tmp_path) as client:
        yield client
