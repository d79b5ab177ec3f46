"""Fixtures of the tests of object stores."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from services.extras.objects import connection
from tests.helpers.s3 import Relay, environment, new_bucket, s3_server


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def relay(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Relay through which this process reaches the server; failed requests are not repeated for long."""
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=2)}
    monkeypatch.setattr(connection, "_RETRIES", retries)
    with Relay(s3_port) as relay:
        for name, value in environment(relay.port).items():
            monkeypatch.setenv(name, value)
        yield relay


@pytest.fixture
def bucket(relay: Relay) -> str:
    """URL of a new bucket."""
    return new_bucket(relay.target)
