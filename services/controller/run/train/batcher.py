"""Forms the training batches of a run, and drops or restarts groups that became too stale."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from services.common.clock import Clock
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.task_group import TaskGroup
from services.controller.rules.groups import RUNNING, Group, GroupState
from services.controller.rules.ledger import Ledger
from services.controller.rules.staleness import choose_batch
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.observe.waits import Waits
from services.wire.trainer import TrainerClient


async def take_batch(
    scheduler: GenerationScheduler,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
    waits: Waits,
    unless: asyncio.Event,
    meanwhile: Coroutine[None, None, None] | None = None,
) -> list[Group] | None:
    """Waits for the groups of the next batch and moves them to TRAINING.

    Args:
        scheduler: Collects finished groups.
        ledger: States of the groups.
        algorithm: Policy for stale groups.
        weight_version: Version that the batch will be trained from.
        clock: Clock of the time-out for stale groups.
        waits: Records the waiting time by reason.
        unless: Ends the wait once it is set.
        meanwhile: Runs during the wait and is cancelled after it.

    Returns:
        Groups, oldest first; None if ``unless`` was set first.
    """
    if unless.is_set():
        if meanwhile is not None:
            meanwhile.close()
        return None
    async with TaskGroup() as tasks:
        beside = None if meanwhile is None else tasks.create_task(meanwhile)
        ending = tasks.create_task(unless.wait())
        taking = tasks.create_task(
            _take_batch(
                scheduler,
                ledger,
                algorithm,
                weight_version=weight_version,
                clock=clock,
                waits=waits,
            )
        )
        await asyncio.wait((ending, taking), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        taking.cancel()
        if beside is not None:
            beside.cancel()
    return None if taking.cancelled() else taking.result()


async def _take_batch(
    scheduler: GenerationScheduler,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
    waits: Waits,
) -> list[Group]:
    deadline = clock.monotonic() + algorithm.stale_wait_timeout_s
    while True:
        # Groups in flight make up at least one batch, so waiting for a full batch misses none.
        with waits("no_data"):
            await scheduler.until(
                lambda: ledger.count(GroupState.READY) >= scheduler.gate.groups_per_step
            )
        may_wait = algorithm.on_stale == "wait" and clock.monotonic() < deadline
        choice = choose_batch(
            ledger.in_state(GroupState.READY),
            ledger.begun(),
            gate=scheduler.gate,
            trainer_version=weight_version,
            wait_for_due=may_wait,
            keep_stale=algorithm.on_stale in ("wait", "mask"),
        )
        if choice.batch:
            ledger.train(choice.batch)
            scheduler.batch_taken()
            return list(choice.batch)
        if choice.stale and algorithm.on_stale == "restart":
            await scheduler.restart(choice.stale)
        elif choice.stale:
            await scheduler.drop({"stale": choice.stale})
        elif choice.awaited:
            with waits("barrier"):
                await _wait_for_any(choice.awaited, scheduler, deadline - clock.monotonic())


async def _wait_for_any(
    groups: Sequence[Group], scheduler: GenerationScheduler, timeout_s: float
) -> None:
    """Waits until one of the groups is finished or ended, for at most ``timeout_s``."""
    unfinished = (*RUNNING, GroupState.PARTIAL)
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            await scheduler.until(lambda: any(g.state not in unfinished for g in groups))
    except TimeoutError:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyTraining:
    """Accumulates gradients of finished groups while the rest of their batch is still generated.

    This is not recorded: a trainer that lost its gradients trains the whole step.
    """

    trainer: TrainerClient
    ledger: Ledger
    scheduler: GenerationScheduler
    waits: Waits
    """Records the time in which the trainer worked."""

    async def accumulate(self, step: int, *, weight_version: int, timeout_s: float) -> None:
        """Sends the groups of a step to the trainer as they finish, until it is cancelled.

        All groups that are ready when the trainer is free go in one call, so that its batches are
        large.
        """
        sent: set[tuple[str, int]] = set()

        def due() -> list[Group]:
            ready = self.ledger.in_state(GroupState.READY)
            gate = self.scheduler.gate
            if len(ready) >= gate.groups_per_step:
                return []
            return [
                group
                for group in ready
                if (group.group_id, group.attempt) not in sent
                and not gate.is_stale(group.oldest_version, trainer_version=weight_version)
            ]

        while True:
            await self.scheduler.until(lambda: bool(due()))
            groups, begin = due(), time.perf_counter()
            sent |= {(group.group_id, group.attempt) for group in groups}
            try:
                await self.trainer.accumulate(
                    step,
                    self.scheduler.stored.meta(groups),
                    weight_version=weight_version,
                    timeout_s=timeout_s,
                )
            finally:
                self.waits.worked(time.perf_counter() - begin)
