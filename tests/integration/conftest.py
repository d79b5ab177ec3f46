"""Fixtures of the integration tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.plumbing import write_plumbing
from tests.helpers.system import System, running_system


@pytest.fixture(scope="session")
def system(tmp_path_factory) -> Iterator[System]:
    """Yields services that many tests share, so that they start once; no test may kill them."""
    with running_system(tmp_path_factory.mktemp("system")) as started:
        yield started


@pytest.fixture
def plumbing(tmp_path) -> Path:
    """Writes the specification of a short run on a random model; returns its path."""
    return write_plumbing(tmp_path)
