"""Fixtures of all unit tests."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.models import configs
from services.common.models.evaluator import Evaluator
from services.controller.store import database


class _SharedEvaluator(Evaluator):
    """Evaluator that all tests share, because its start takes seconds."""

    def close(self) -> None:
        """Does nothing, so that the next test can use the evaluator."""


@pytest.fixture(scope="session", autouse=True)
def _one_evaluator_of_configs() -> Iterator[None]:
    shared = _SharedEvaluator("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "Evaluator", lambda _: shared)
        yield
    Evaluator.close(shared)


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
