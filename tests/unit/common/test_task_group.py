"""Tests that a failed task group does not cancel its parent later, and that its errors keep their class."""

import asyncio

import pytest

from services.common.task_group import TaskGroup, gather_in_group, until_first, unwrapped


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("lost")


async def _fail_at_the_end() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("lost")


@pytest.mark.parametrize("waits_for", ["task", "body"])
async def test_a_deadline_after_a_failed_group_is_a_timeout_and_nothing_is_cancelled(
    waits_for: str,
) -> None:
    with pytest.RaisesGroup(ValueError):
        async with TaskGroup() as tasks:
            tasks.create_task(_fail())
            if waits_for == "body":
                await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await asyncio.Event().wait()


async def test_an_outside_cancellation_propagates() -> None:
    async def parent() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.RaisesGroup(ValueError):
            async with TaskGroup() as tasks:
                tasks.create_task(_fail_at_the_end())
        return task.cancelling()

    parenting = asyncio.create_task(parent())
    await asyncio.sleep(0.01)
    parenting.cancel()
    assert await parenting == 1


async def test_the_first_error_of_nested_groups_comes_as_it_is() -> None:
    with pytest.raises(ValueError, match="lost"), unwrapped():
        async with TaskGroup(), TaskGroup() as tasks:
            tasks.create_task(_fail())


async def test_a_group_whose_first_error_is_of_another_kind_stays_whole() -> None:
    with pytest.RaisesGroup(ValueError), unwrapped(KeyError):
        async with TaskGroup() as tasks:
            tasks.create_task(_fail())


async def test_works_run_together_and_their_results_keep_their_order() -> None:
    second = asyncio.Event()

    async def first() -> int:
        await second.wait()
        return 1

    async def other() -> int:
        second.set()
        return 2

    assert await gather_in_group([first(), other()]) == [1, 2]
    assert await gather_in_group([other()]) == [2]


async def test_the_first_of_several_works_that_fails_ends_the_others() -> None:
    for works in ([_fail()], [asyncio.Event().wait(), _fail()]):
        with pytest.raises(ValueError, match="lost"):
            await gather_in_group(works)


async def test_the_first_that_is_done_ends_the_others() -> None:
    first, others = await until_first(asyncio.sleep(0, "done"), asyncio.Event().wait())
    assert first.result() == "done"
    assert others.cancelled()


async def test_a_failure_ends_the_race() -> None:
    with pytest.RaisesGroup(ValueError):
        await until_first(asyncio.Event().wait(), _fail())
