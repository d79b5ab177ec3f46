"""Tests of the weight transport that docs/adding.md adds."""

import pytest

from services.common.runspec import weight_modes
from tests.helpers.pages import example
from tests.helpers.weight_members import Cluster


@pytest.fixture(autouse=True)
def _added(tmp_path, monkeypatch):
    """Registers the transport of docs/adding.md."""
    module = example("adding.md", "pulled.py", tmp_path)
    entry = example("adding.md", "weight_modes.py", tmp_path).read_text()
    entry = entry.replace("services.weightsync.pulled", str(module))
    for name, transport in eval(f"{{{entry}}}", vars(weight_modes)).items():
        monkeypatch.setitem(weight_modes.TRANSPORTS, name, transport)


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("mode", weight_modes.MODES)
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
