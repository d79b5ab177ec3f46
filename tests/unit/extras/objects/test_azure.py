"""The tests of checkpoints, records and copies, with a container of Azure's emulator in place of a bucket."""

from collections.abc import Iterator

import pytest

from tests.helpers.azure import azurite, environment, needs_azurite, new_container
from tests.unit.extras.objects.contract import *  # noqa: F403
from tests.unit.extras.objects.test_checkpoints import _no_pauses, opened  # noqa: F401

pytestmark = [needs_azurite, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def azure_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with azurite(tmp_path_factory.mktemp("azurite")) as port:
        yield port


@pytest.fixture
def bucket(azure_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(azure_port).items():
        monkeypatch.setenv(name, value)
    return new_container(azure_port)
