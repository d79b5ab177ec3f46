"""Tests of the weight transport that docs/adding.md adds."""

import pytest

from services.common.runspec import weight_modes
from tests.helpers.packages import install_from
from tests.helpers.pages import example
from tests.helpers.weight_members import Cluster


@pytest.fixture(autouse=True)
def _added(tmp_path, monkeypatch):
    """Installs the transport of docs/adding.md."""
    for name in ("pulled.py", "pulled_kind.py"):
        example("adding.md", name, tmp_path)
    install_from(example("adding.md", "pulled.toml", tmp_path), monkeypatch)


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize(
    "mode", [name for name, mode in weight_modes.MODES.items() if not mode.engines]
)
async def test_the_transport_of_the_page_carries_every_mode(mode, num_sources):
    cluster = Cluster(num_sources, mode, backend="pulled")
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"][version * 100, 3] = version
        await cluster.publish(version)
        assert cluster.serves_what_was_sent()


async def test_a_later_group_replaces_one_that_was_aborted():
    cluster = Cluster(backend="pulled")
    await cluster.form_group()
    await cluster.publish(0)
    await cluster.prepare(1)
    for member in cluster.members:
        await member.abort(1, "a test")
    results = await cluster.transfer(1)
    assert all(isinstance(result, Exception) for result in results)
    await cluster.form_group(epoch=2)
    await cluster.publish(1, epoch=2)
    assert cluster.serves_what_was_sent()
