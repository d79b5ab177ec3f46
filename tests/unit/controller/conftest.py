"""Fixtures of the controller's tests."""

import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests with the mark ``postgresql`` on both databases, and all others on SQLite.

    The tests of ``store/``, which contains all SQL statements, use both databases on each commit. Other
    tests use PostgreSQL only in the nightly run.
    """
    if "database_url" in metafunc.fixturenames:
        databases = ["sqlite"]
        if metafunc.definition.get_closest_marker("postgresql"):
            is_store = metafunc.definition.path.parent.name == "store"
            marks = () if is_store else pytest.mark.nightly
            databases.append(pytest.param("postgresql", marks=marks))
        metafunc.parametrize("database_url", databases, indirect=True)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory) -> Path:
    """Returns a SQLite database with all tables; copying it takes a tenth of the time of a migration."""
    path = tmp_path_factory.mktemp("database") / "migrated.db"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def database_url(request, tmp_path) -> Iterator[str]:
    """Yields the URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    postgres_url = request.getfixturevalue("postgres_url")
    if postgres_url is None:
        pytest.skip("PostgreSQL is not installed")
    # Each test gets a schema, not a database: PostgreSQL creates hundreds of files for a database.
    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    yield f"{postgres_url}&options=-csearch_path%3D{name}"


@pytest.fixture
def database(database_url, migrated_file) -> Iterator[Database]:
    """Yields an open database with the schema of this release."""
    with pytest.MonkeyPatch.context() as patch:
        if database_url.startswith("sqlite"):
            shutil.copy(migrated_file, database_url.removeprefix("sqlite:///"))
            patch.setattr("services.controller.store.database._migrate", lambda _: None)
        opened = Database(database_url)
    yield opened
    opened.close()


@pytest.fixture
async def manager(database) -> AsyncIterator[RunManager]:
    """Yields a manager whose runs wait for workers that never register."""
    async with open_manager(database) as manager:
        yield manager


@pytest.fixture
async def api(manager, database, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of the manager's REST API."""
    async with client_of(manager, database, tmp_path) as client:
        yield client
