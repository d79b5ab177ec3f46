"""Tests that the admission limit adapts to the engine's load."""

import asyncio

from services.rollout.sampling.sampler import Admission


async def test_pressure_halves_the_admission_limit_and_calm_adds_one() -> None:
    admission = Admission(100)
    entered = 0

    async def work() -> None:
        nonlocal entered
        async with admission.admitted():
            entered += 1
            await release.wait()

    release = asyncio.Event()
    tasks = [asyncio.ensure_future(work()) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await admission.adapt(kv_used_fraction=0.99, publish_wait_s=0)
    assert admission.limit == 20
    await admission.adapt(kv_used_fraction=0.1, publish_wait_s=5)
    assert admission.limit == 10
    for _ in range(3):
        await admission.adapt(kv_used_fraction=0.1, publish_wait_s=0)
    assert admission.limit == 13
    late = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    assert entered == 40
    release.set()
    await asyncio.gather(*tasks, late)
    assert entered == 41


async def test_the_limit_never_falls_below_one_nor_rises_above_its_maximum() -> None:
    admission = Admission(3)
    for _ in range(10):
        await admission.adapt(kv_used_fraction=1.0, publish_wait_s=0)
    assert admission.limit == 1
    for _ in range(10):
        await admission.adapt(kv_used_fraction=0.0, publish_wait_s=0)
    assert admission.limit == 3
