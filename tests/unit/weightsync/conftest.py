"""Destroys the groups of each test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Each thread of a Gloo group that a cycle keeps wakes up a hundred times a second."""
    gc.freeze()  # only what the test leaves is looked through: all of a worker's objects take a second
    yield
    gc.collect()
