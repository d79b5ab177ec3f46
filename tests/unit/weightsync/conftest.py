"""Fixture that destroys the process groups of each test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collects reference cycles: a thread of a Gloo group in a cycle wakes up a hundred times a second."""
    gc.freeze()  # limits the collection to the test's objects, because all objects take a second
    yield
    gc.collect()
