"""Fixtures of all unit tests."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.models import configs
from services.controller.store import database


@pytest.fixture(scope="session", autouse=True)
def _evaluator_of_configs_keeps_its_process() -> Iterator[None]:
    """Lets all tests of this process use one process that evaluates configs, whose start takes 1 s of CPU."""
    close = configs._CONFIGS.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs._CONFIGS, "close", lambda: None)
        yield
    close()


@pytest.fixture(scope="session", autouse=True)
def _files_are_not_flushed() -> Iterator[None]:
    """Disables fsync: it takes milliseconds, and no test simulates a power failure."""
    prepare = database._prepare_sqlite

    def prepare_sqlite(connection: Any, record: Any) -> None:
        prepare(connection, record)
        connection.execute("PRAGMA synchronous=OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_prepare_sqlite", prepare_sqlite)
        patch.setattr(os, "fsync", lambda _: None)
        yield
