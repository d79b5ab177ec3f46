"""Fixtures of the controller's tests."""

import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from services.controller.store.database import Database
from tests.unit.controller.databases import postgres_cluster


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
    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    yield postgres_url.replace("/postgres?", f"/{name}?")


@pytest.fixture
def database(database_url) -> Iterator[Database]:
    """An open database of this release."""
    opened = Database(database_url)
    yield opened
    opened.close()
