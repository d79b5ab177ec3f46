"""When a worker of the trainer ends."""

import asyncio

from services.common.lifetime import until_told_to_stop
from services.common.task_group import TaskGroup
from services.controller.client import WorkerSession


async def until_stopped(session: WorkerSession) -> None:
    """Wait for the controller's order or a signal."""
    async with TaskGroup() as group:
        waits = [group.create_task(session.stopped()), group.create_task(until_told_to_stop())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
