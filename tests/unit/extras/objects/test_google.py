"""The tests of checkpoints, records and copies through the client of Google Cloud Storage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gcs import environment, gcs_server, new_bucket
from tests.helpers.s3 import needs_s3
from tests.unit.extras.objects.contract import *  # noqa: F403
from tests.unit.extras.objects.test_checkpoints import _no_pauses, opened  # noqa: F401

pytestmark = [needs_s3, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def google_port() -> Iterator[int]:
    with gcs_server() as port:
        yield port


@pytest.fixture
def bucket(google_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(google_port, tmp_path).items():
        monkeypatch.setenv(name, value)
    return new_bucket(google_port)
