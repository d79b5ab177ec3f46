"""Enters the loops of one run and trains its steps; the diagram is in ``pipeline.py``.

Synchronous, one-step-off and asynchronous training are this loop with different staleness bounds. After every
lost worker or controller restart the loop is entered again and resumes from the database.
"""

import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from services.common.host import Clock
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import Launcher
from services.controller.membership import Membership
from services.controller.run.connections import connect, create_partitions
from services.controller.run.lifecycle.recovery import restore
from services.controller.run.pipeline import TrainingPipeline
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.run.train.gpu_time_sharing import start_colocated
from services.wire.transferqueue.client import TransferQueueClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Clients and settings that all runs of a controller share."""

    membership: Membership
    launcher: Launcher
    queue: TransferQueueClient
    clock: Clock
    heartbeat_timeout_s: float


@asynccontextmanager
async def connected(
    spec: CurrentSpec,
    services: Services,
    *,
    journal: Journal,
    request_queue: RequestQueue,
    present: Collection[str],
    lost_workers: Collection[str] = (),
) -> AsyncIterator[TrainingPipeline]:
    """Connects to a run's loaded workers and restores its pipeline from the database.

    Args:
        services: Clients and settings that all runs share.
        present: Rollouts to start with; the run does not wait for others.
        lost_workers: Rollouts that died since the previous attempt.
    """
    attempt = await journal.begin_attempt()
    is_queue_empty = await create_partitions(
        services.queue, journal.run_id, spec.now, snapshot_id=await journal.newest_snapshot()
    )
    if spec.now.topology.is_colocated:
        await start_colocated(
            journal.run_id,
            spec,
            launcher=services.launcher,
            membership=services.membership,
            num_rollouts=len(present),
        )
    async with AsyncExitStack() as stack:
        connections = await connect(
            stack,
            journal.run_id,
            spec,
            services.membership,
            queue=services.queue,
            attempt=attempt,
            is_queue_empty=is_queue_empty,
            present=present,
        )
        spec.num_train_rows = sum(connections.train_rows.values())
        await journal.data_opened(
            {**connections.train_rows, **connections.heldout_rows}, steps=spec.num_steps
        )
        yield await restore(
            spec,
            connections,
            journal=journal,
            queue=services.queue,
            clock=services.clock,
            request_queue=request_queue,
            lost_workers=lost_workers,
            launcher=services.launcher,
        )


async def train(pipeline: TrainingPipeline) -> bool:
    """Trains all remaining steps; returns False if the steps were to end first."""
    async with TaskGroup() as tasks:
        background = [tasks.create_task(work) for work in pipeline.background()]
        await pipeline.catch_up()
        if not pipeline.spec.now.validation.only:
            dispatching = tasks.create_task(pipeline.scheduler.dispatch_loop())
            await _train_steps(pipeline)
            dispatching.cancel()
        await pipeline.finish()
        for task in background:
            task.cancel()
    if pipeline.is_done:
        await pipeline.record_event("Finished", "trained and evaluated all steps", {})
    return pipeline.is_done


async def _train_steps(pipeline: TrainingPipeline) -> None:
    while not pipeline.is_done:
        begin = time.perf_counter()
        batch = await pipeline.take_batch()
        if batch is None:
            return
        await pipeline.train(batch, begin=begin)
        await pipeline.settle()
