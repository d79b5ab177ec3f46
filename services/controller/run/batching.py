"""Waits for the next batch of a run and settles what grew too stale for it."""

import asyncio

from services.common.clock import Clock
from services.common.spec.algorithm import AlgorithmSpec
from services.controller.run.generation import Generation
from services.controller.run.ledger import Group, GroupState, Ledger
from services.controller.run.replay import choose_batch


async def take_batch(
    generation: Generation,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
    unless: asyncio.Event,
) -> list[Group] | None:
    """Wait for the groups of the next batch; they are TRAINING when this returns.

    Args:
        generation: Finishes groups.
        ledger: Their states.
        algorithm: Bound and policy for stale groups.
        weight_version: Version of the weights that the batch will be trained from.
        clock: For the longest wait.
        unless: Ends the wait.

    Returns:
        The groups, oldest first; None if ``unless`` came before them.
    """
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(unless.wait())
        taking = tasks.create_task(
            _take_batch(generation, ledger, algorithm, weight_version=weight_version, clock=clock)
        )
        await asyncio.wait((ending, taking), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        taking.cancel()
    return None if taking.cancelled() else taking.result()


async def _take_batch(
    generation: Generation,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
) -> list[Group]:
    deadline = clock.monotonic() + algorithm.stale_wait_timeout_s
    while True:
        may_wait = algorithm.on_stale == "wait" and clock.monotonic() < deadline
        choice = choose_batch(
            ledger.in_state(GroupState.READY),
            ledger.begun(),
            gate=generation.gate,
            trainer_version=weight_version,
            wait_for_due=may_wait,
            keep_stale=algorithm.on_stale in ("wait", "mask"),
        )
        for group in choice.stale:
            if algorithm.on_stale == "restart":
                await generation.restart(group)
            else:
                await generation.drop(group, "stale")
        if choice.batch:
            ledger.train(choice.batch)
            return list(choice.batch)
        if not choice.stale:
            rest_s = deadline - clock.monotonic()
            await _wait(generation.finished, rest_s if rest_s > 0 else None)


async def _wait(condition: asyncio.Condition, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s), condition:
            await condition.wait()
    except TimeoutError:
        return
