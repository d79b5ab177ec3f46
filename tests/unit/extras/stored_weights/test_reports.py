import asyncio
from types import SimpleNamespace

from services.common.callables import load_callable
from services.common.runspec.weight_modes import TRANSPORTS


async def test_a_failing_store_is_reported_once_and_its_return_too(monkeypatch):
    monkeypatch.setattr("services.extras.stored_weights.reports._EVERY_S", 0.0)
    weights = SimpleNamespace(
        store_troubles={"rollout-0": SimpleNamespace(failing_s=12.0, cause="no such bucket")}
    )
    events = asyncio.Queue()
    report = load_callable(TRANSPORTS["storage"].reports)
    task = asyncio.create_task(report("run_a", "/weights", weights, record=events.put))
    async with asyncio.timeout(10):
        failure = await events.get()
        weights.store_troubles = {}
        recovery = await events.get()
    task.cancel()
    await asyncio.wait([task])

    assert failure.type == "WeightStoreFailing"
    assert "no such bucket" in failure.message
    assert recovery.type == "WeightStoreResumed"
    assert events.empty()
