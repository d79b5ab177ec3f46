"""What a task group leaves behind does not end the task later."""

import asyncio

import pytest

from services.common.cancellation import forget_cancellations


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("lost")


async def test_a_deadline_after_a_failed_group_is_a_timeout_and_nothing_is_cancelled() -> None:
    with pytest.RaisesGroup(ValueError):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())
    forget_cancellations()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await asyncio.Event().wait()
