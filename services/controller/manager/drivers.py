"""Drives the active runs, and brings to each what is heard of its workers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.errors import FailedPreconditionError, UnavailableError
from services.common.runspec.loader import SpecError, parse_spec
from services.common.task_group import TaskGroup
from services.controller.client import GroupFailure
from services.controller.launch.launcher import WorkerExit
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.lifecycle.driver import RunDriver
from services.controller.run.lifecycle.loop import Services
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import RequestQueue
from services.controller.store.records import RELEASE, Event, Note, Run
from services.controller.store.runs import InvalidTransitionError, RunStore

logger = logging.getLogger(__name__)

SPEC_NOT_ACCEPTED = "SpecNotAccepted"
"""Why a run is paused whose specification was stored by a release with other keys or rules."""


class Apply(Protocol):
    """Moves a run and tells of it."""

    async def __call__(
        self, run_id: str, event: RunEvent, reason: str, message: str = "", *, actor: str = ""
    ) -> Run:
        """The run in its new state."""


class Drivers:
    """A driver for each active run.

    Args:
        store: The runs.
        tasks: Owns the drivers.
        apply: Moves a run.
        on_event: Hears of each event, with its project.
        on_end: Called when a run is not driven any more.
    """

    def __init__(
        self,
        store: RunStore,
        tasks: TaskGroup,
        *,
        apply: Apply,
        on_event: Callable[[Event, str], None],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._apply = apply
        self._on_event = on_event
        self._on_end = on_end
        self._drivers: dict[str, RunDriver] = {}
        self.services: Services
        """What every run needs; set before the first is driven."""

    def drive(self, run: Run) -> None:
        """Drive a run to its end; one whose specification this release does not accept is set aside."""
        try:
            spec = parse_spec(run.spec_json)
        except SpecError as error:
            self._tasks.create_task(self._set_aside(run, error))
            return

        async def move(event: RunEvent, reason: str, message: str) -> RunState:
            return (await self._apply(run.run_id, event, reason, message)).state

        database = self._store.database
        driver = self._drivers[run.run_id] = RunDriver(
            run.run_id,
            spec,
            self.services,
            journal=Journal(
                run.run_id,
                database=database,
                store=self._store,
                on_event=lambda event: self._on_event(event, run.project),
            ),
            request_queue=RequestQueue(run.run_id, database),
            state=run.state,
            move=move,
        )
        driver.task = self._tasks.create_task(self._drive(run.run_id, driver))

    async def _set_aside(self, run: Run, error: SpecError) -> None:
        """Stop the workers of a run that cannot be driven, and pause it for a release that can drive it."""
        await self.services.membership.close_run(run.run_id)
        await self.services.launcher.stop(run.run_id)
        message = (
            f"release {RELEASE} does not accept the specification that release "
            f"{run.release or 'unknown'} stored: {'; '.join(error.problems)}; resume the run with a release "
            "that accepts it, or cancel it and submit it again"
        )
        logger.error(
            "a run was set aside", extra={"run": run.run_id, "problems": list(error.problems)}
        )
        with suppress(InvalidTransitionError):  # somebody cancelled it meanwhile
            if run.state is RunState.CANCELLING:
                await self._apply(run.run_id, RunEvent.STOPPED, "CancelledByUser", "")
            else:
                if run.state is RunState.RUNNING:
                    await self._apply(run.run_id, RunEvent.PAUSE, SPEC_NOT_ACCEPTED, message)
                await self._apply(run.run_id, RunEvent.DRAINED, SPEC_NOT_ACCEPTED, message)
        await self._on_end()

    async def _drive(self, run_id: str, driver: RunDriver) -> None:
        try:
            await driver.drive()
        except InvalidTransitionError:
            # It was cancelled in the moment in which it ended by itself, or had ended before.
            with suppress(InvalidTransitionError):
                await self._apply(run_id, RunEvent.STOPPED, "CancelledByUser", "")
        finally:
            del self._drivers[run_id]
        await self._on_end()

    def driven(self) -> Collection[str]:
        """Runs that are driven now."""
        return frozenset(self._drivers)

    def find(self, run_id: str) -> RunDriver | None:
        """The driver of a run, or None."""
        return self._drivers.get(run_id)

    def running(self, run: Run) -> RunDriver:
        """The driver of a run that trains.

        Raises:
            InvalidTransitionError: If it does not train now.
        """
        driver = self.find(run.run_id)
        if driver is None or run.state is not RunState.RUNNING:
            raise InvalidTransitionError(
                f"run {run.run_id} is {run.state}; this needs a RUNNING one", run_id=run.run_id
            )
        return driver

    async def evaluate(self, run: Run) -> None:
        """Evaluate the weights that a run serves.

        Raises:
            InvalidTransitionError: If it does not train now.
            FailedPreconditionError: If it has no prompts to evaluate them with.
        """
        driver = self.running(run)
        if driver.spec.data.heldout is None:
            raise FailedPreconditionError(
                f"run {run.run_id} has no held-out prompts to evaluate its weights with; fork it with "
                "data.heldout",
                run_id=run.run_id,
            )
        await driver.evaluate()

    def activities(self, run_id: str) -> list[str]:
        """What a run is doing now."""
        driver = self.find(run_id)
        return driver.activities() if driver is not None else []

    def leave(self) -> None:
        """Stop driving; the runs go on until another controller drives them."""
        for driver in list(self._drivers.values()):
            driver.leave()

    def suspend(self) -> None:
        """Stop driving, and stop the workers; runs are paused where they are."""
        for driver in list(self._drivers.values()):
            driver.suspend()

    async def wait(self) -> None:
        """Return once nothing that is driven now is driven any more."""
        tasks = [driver.task for driver in self._drivers.values() if driver.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def report_failures(self, run_id: str, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples.

        Raises:
            UnavailableError: If the run is about to be driven; the worker reports again.
        """
        if (driver := self.find(run_id)) is not None:
            await driver.report_failures(failures)
            return
        run = await self._store.database.run(self._store.get, run_id)
        if not run.is_terminal:
            raise UnavailableError("the run is being restored; report again")

    def worker_exited(self, exit_: WorkerExit) -> None:
        """A worker ended by itself."""
        if (driver := self.find(exit_.run_id)) is not None:
            driver.worker_exited(exit_)

    def worker_replaced(self, run_id: str, worker_id: str) -> None:
        """Another process registered in a worker's place."""
        if (driver := self.find(run_id)) is not None:
            driver.worker_lost(worker_id, f"{worker_id} was started again", is_replaced=True)

    def worker_pending(self, run_id: str, reason: str, message: str) -> None:
        """A worker cannot start yet; the run shows why."""
        note = Note("WorkerPending", f"{reason}: {message}", {"reason": reason})
        if (driver := self.find(run_id)) is not None:
            self._tasks.create_task(driver.note(note))
