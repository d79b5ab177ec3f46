"""Tests of slots and of the gate for engines without an internal queue."""

import asyncio

from services.extras.external_engine.engine import Gate, Slots
from tests.helpers.engines import request


async def test_groups_of_an_older_version_get_the_next_slot() -> None:
    async def work(name: str, oldest_version: int | None) -> None:
        async with places.acquire(
            request(name, (1,), oldest_version=oldest_version)
        ) as is_admitted:
            assert is_admitted
            order.append(name)
            await release.wait()

    places, order, release = Slots(1), [], asyncio.Event()
    names: list[tuple[str, int | None]] = [("a", None), ("b", None), ("c", 4), ("d", 2)]
    async with asyncio.TaskGroup() as tasks:
        for name, version in names:
            tasks.create_task(work(name, version))
        await asyncio.sleep(0)
        assert (places.running, places.num_waiting) == ({"a"}, 3)
        release.set()
    assert order == ["a", "d", "c", "b"]
    await places.wait_until_empty()


async def two_that_wait() -> tuple[Slots, list[asyncio.Future[bool]]]:
    """Returns closed slots and the waiting calls "a" and "b", which return whether they were admitted."""

    async def work(name: str) -> bool:
        async with places.acquire(request(name, (1,))) as is_admitted:
            return is_admitted

    places = Slots(1)
    places.close()
    waiting = [asyncio.ensure_future(work(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    return places, waiting


async def test_waiting_requests_can_be_rejected() -> None:
    places, waiting = await two_that_wait()
    places.reject_waiting({"a"})
    places.open()
    assert [await task for task in waiting] == [False, True]


async def test_a_place_skips_callers_that_were_cancelled_at_the_same_moment() -> None:
    places, waiting = await two_that_wait()
    waiting[0].cancel()
    places.open()
    assert await waiting[1]
    assert places.num_waiting == len(places.running) == 0


async def test_a_closed_gate_lets_tasks_inside_finish_and_holds_others() -> None:
    async def passenger(name: str) -> None:
        async with gate.enter(give_up=lambda: False):
            events.append(f"{name} in")
            await asyncio.sleep(0)
            events.append(f"{name} out")

    async def keeper() -> None:
        async with gate.closed():
            events.append("alone")

    gate, events = Gate(), list[str]()
    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b"):
            tasks.create_task(passenger(name))
        tasks.create_task(keeper())
        await asyncio.sleep(0)
        tasks.create_task(passenger("c"))
    assert events.index("alone") > max(events.index("a out"), events.index("b out"))
    assert events.index("c in") > events.index("alone")


async def test_a_held_gate_passes_only_tasks_that_quit() -> None:
    async def passenger(name: str) -> None:
        async with gate.enter(give_up=lambda: name in quitting):
            events.append(name)

    gate, events, quitting = Gate(), list[str](), set[str]()
    gate.keep_shut()
    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b"):
            tasks.create_task(passenger(name))
        await asyncio.sleep(0)
        quitting.add("b")
        async with gate.closed():
            events.append("alone")
        await gate.recheck_waiting()
        await asyncio.sleep(0.001)
        events.append("released")
        await gate.release()
    assert events == ["alone", "b", "released", "a"]
