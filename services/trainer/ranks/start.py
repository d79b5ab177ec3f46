"""Startup and shutdown of a worker's ranks: rank 0 learns of the run and passes it on to the others."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.common.lifetime import wait_for_shutdown
from services.common.local_copies import with_local_copies
from services.common.runspec.loader import canonical_json
from services.common.runspec.run import RunSpec
from services.common.task_group import until_first
from services.trainer.checkpoint.compatibility import OtherCheckpointError
from services.trainer.checkpoint.manifest import UnusableCheckpointError
from services.trainer.engines.base import Progress
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind, RankFailedError
from services.trainer.settings import TrainerSettings
from services.trainer.transfers import QueueTransfers
from services.wire.controller import WorkerSession
from services.wire.data.client import DataClient

_OUTAGE_EVERY_S = 1.0
_Built_co = TypeVar("_Built_co", covariant=True)


class Build(Protocol[_Built_co]):
    """Loads the models that a rank trains or scores with. Blocks."""

    def __call__(
        self,
        spec: RunSpec,
        settings: TrainerSettings,
        *,
        transfers: QueueTransfers,
        progress: Progress,
    ) -> _Built_co:
        """Loads the models. All ranks must call it."""


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """Everything that a rank above 0 needs to load and to follow rank 0."""

    spec: RunSpec
    settings: TrainerSettings
    command_group: CommandGroup
    transfers: QueueTransfers

    async def build(self, build: Build[_Built_co]) -> _Built_co:
        """Loads this rank's models."""
        spec = await asyncio.to_thread(_on_this_host, self.spec, self.settings)
        return await asyncio.to_thread(
            build, spec, self.settings, transfers=self.transfers, progress=lambda activity: None
        )


def _on_this_host(
    spec: RunSpec, settings: TrainerSettings, report: Progress | None = None
) -> RunSpec:
    """Returns the specification with local copies of models in object stores. Blocks."""
    return with_local_copies(spec, cache=settings.object_cache, report=report)


def connect_data(address: str, spec: RunSpec) -> AbstractAsyncContextManager[DataClient]:
    return DataClient.connect(address, put_timeout_s=spec.transferqueue.put_timeout_s)


async def load(
    stack: AsyncExitStack,
    session: WorkerSession,
    command_group: CommandGroup,
    settings: TrainerSettings,
    build: Build[_Built_co],
) -> _Built_co:
    """Sends the run to the other ranks and loads the models of rank 0; returns the result of ``build``.

    Reports to the controller if the checkpoint to start from cannot be used, and raises that error.

    Args:
        stack: Closes the connection to the transferqueue.
        session: Registration at the controller, with the run's specification.
        command_group: All ranks; the others wait for the run's specification.
    """
    loop = asyncio.get_running_loop()

    def progress(activity: str) -> None:
        loop.call_soon_threadsafe(lambda: session.report(activity=activity))

    session.report(state="loading", activity="loading the model")
    data = await stack.enter_async_context(
        connect_data(session.transferqueue_address, session.spec)
    )
    session.report_outages(lambda: data.outage() or command_group.outage())
    start = {
        "spec": canonical_json(session.spec),
        "transferqueue_address": session.transferqueue_address,
    }
    await asyncio.to_thread(
        command_group.broadcast, Command(CommandKind.START, payload=json.dumps(start).encode())
    )
    transfers = QueueTransfers(data, loop)
    stack.push_async_callback(transfers.finish)
    try:
        return await asyncio.to_thread(
            lambda: build(
                _on_this_host(session.spec, settings, progress),
                settings,
                transfers=transfers,
                progress=progress,
            )
        )
    except (UnusableCheckpointError, OtherCheckpointError) as error:
        await session.report_own_failure(str(error), code=error.reason)
        raise


async def share_outages(command_group: CommandGroup, outage: Callable[[], str]) -> None:
    """Reports to rank 0 while this rank cannot reach the transferqueue, until it is cancelled.

    Args:
        outage: Returns the cause; empty if the transferqueue can be reached.
    """
    shared = ""
    while True:
        cause = outage()
        if bool(cause) != bool(shared):
            await asyncio.to_thread(command_group.share_outage, cause)
        shared = cause
        await asyncio.sleep(_OUTAGE_EVERY_S)


async def until_stopped(session: WorkerSession, command_group: CommandGroup) -> None:
    """Waits for the controller's stop request or a signal.

    Raises:
        ExceptionGroup: With a RankFailedError, if a rank fails; the cause was reported to the controller.
    """

    async def failed() -> None:
        try:
            await command_group.failed()
        except RankFailedError as error:
            await session.report_own_failure(str(error))
            raise

    await until_first(session.stopped(), wait_for_shutdown(), failed())
