"""Drives the active runs and forwards worker events to each driver."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.errors import FailedPreconditionError, UnavailableError
from services.common.runspec.loader import SpecError, parse_spec
from services.common.task_group import TaskGroup
from services.controller import metrics
from services.controller.launch.launcher import Launcher, WorkerExit, log_command
from services.controller.membership import Worker
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.run.lifecycle.drains import DrainedHost
from services.controller.run.lifecycle.driver import RunDriver
from services.controller.run.lifecycle.loop import Services
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import RequestQueue
from services.controller.store.records import RELEASE, Event, Note, Run
from services.controller.store.runs import InvalidTransitionError, RunStore
from services.wire.controller import GroupFailure

logger = logging.getLogger(__name__)

SPEC_NOT_ACCEPTED = "SpecNotAccepted"
"""State reason of a run that is paused because a release with other keys or rules stored its
specification."""


class Apply(Protocol):
    """Applies a transition to a run and publishes its event."""

    async def __call__(
        self, run_id: str, event: RunEvent, reason: str, message: str = "", *, actor: str = ""
    ) -> Run:
        """Returns the run in its new state."""


class Drivers:
    """Drivers of all active runs.

    Args:
        on_event: Called with each event and its project.
        on_end: Called when a run is no longer driven.
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
        self.tasks = tasks
        """Tasks that outlive the calls which start them."""
        self._apply = apply
        self._on_event = on_event
        self._on_end = on_end
        self._drivers: dict[str, RunDriver] = {}
        self.services: Services
        """Services that every run needs; set before the first run is driven."""

    @property
    def launcher(self) -> Launcher | None:
        """Launcher of all runs; None if no run can be driven."""
        return self.services.launcher if hasattr(self, "services") else None

    def drive(self, run: Run) -> None:
        """Drives a run to its end; pauses a run whose specification this release does not accept."""
        try:
            spec = parse_spec(run.spec_json)
        except SpecError as error:
            self.tasks.create_task(self._pause_unaccepted(run, error))
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
        driver.task = self.tasks.create_task(self._drive(run.run_id, driver))

    async def _pause_unaccepted(self, run: Run, error: SpecError) -> None:
        """Stops the workers of a run that cannot be driven, and pauses it for a release that can."""
        await self.services.membership.close_run(run.run_id)
        await self.services.launcher.stop(run.run_id)
        message = (
            f"release {RELEASE} does not accept the specification that release "
            f"{run.release or 'unknown'} stored: {'; '.join(error.problems)}; resume the run with a release "
            "that accepts it, or cancel it and submit it again"
        )
        logger.error(
            "run paused: its specification is not accepted",
            extra={"run": run.run_id, "problems": list(error.problems)},
        )
        with suppress(InvalidTransitionError):  # a user cancelled it meanwhile
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
            # The run was cancelled at the moment at which it ended by itself, or had ended before.
            with suppress(InvalidTransitionError):
                await self._apply(run_id, RunEvent.STOPPED, "CancelledByUser", "")
        finally:
            if self._drivers.get(run_id) is driver:  # the run may be driven again already
                del self._drivers[run_id]
            asyncio.get_running_loop().call_later(metrics.KEPT_S, self._forget_metrics, run_id)
        await self._on_end()

    def _forget_metrics(self, run_id: str) -> None:
        if run_id not in self._drivers:  # it may have been resumed
            metrics.forget_run(run_id)

    def driven_runs(self) -> Collection[str]:
        return frozenset(self._drivers)

    def find(self, run_id: str) -> RunDriver | None:
        return self._drivers.get(run_id)

    def running(self, run: Run) -> RunDriver:
        """Returns the driver of a run that trains.

        Raises:
            InvalidTransitionError: If the run is not RUNNING.
        """
        driver = self.find(run.run_id)
        if driver is None or run.state is not RunState.RUNNING:
            raise InvalidTransitionError(
                f"run {run.run_id} must be RUNNING, but is {run.state}", run_id=run.run_id
            )
        return driver

    async def evaluate(self, run: Run) -> None:
        """Evaluates the weights that a run serves.

        Raises:
            InvalidTransitionError: If the run is not RUNNING.
            FailedPreconditionError: If the run has no held-out prompts.
        """
        driver = self.running(run)
        if driver.spec.data.heldout is None:
            raise FailedPreconditionError(
                f"run {run.run_id} has no held-out prompts to evaluate on; fork it with data.heldout",
                run_id=run.run_id,
            )
        await driver.evaluate()

    def activities(self, run_id: str) -> list[str]:
        driver = self.find(run_id)
        return driver.activities() if driver is not None else []

    def detach(self) -> None:
        """Stops driving; the runs continue until another controller drives them."""
        for driver in list(self._drivers.values()):
            driver.detach()

    def suspend(self) -> None:
        """Stops driving and stops the workers; runs are paused where they are."""
        for driver in list(self._drivers.values()):
            driver.suspend()

    async def wait(self) -> None:
        tasks = [driver.task for driver in self._drivers.values() if driver.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def report_failures(self, run_id: str, failures: Sequence[GroupFailure]) -> None:
        """Forwards failures of groups to the run's driver.

        Raises:
            UnavailableError: If the run has not ended but has no driver yet; the worker reports
                again.
        """
        if (driver := self.find(run_id)) is not None:
            await driver.report_failures(failures)
            return
        run = await self._store.database.run(self._store.get, run_id)
        if not run.is_terminal:
            raise UnavailableError("the run is being restored; report again")

    def worker_exited(self, exit_: WorkerExit) -> None:
        """Notifies the driver that a worker ended by itself."""
        if (driver := self.find(exit_.run_id)) is not None:
            driver.worker_exited(exit_)

    def worker_failed(
        self, run_id: str, worker_id: str, *, cause: str, final_code: str = ""
    ) -> None:
        """Notifies the driver that a worker reports why it ends.

        Args:
            final_code: Code with which the run ends; empty if another start may succeed.
        """
        if (driver := self.find(run_id)) is not None:
            message = f"{worker_id} failed: {cause} (log: {log_command(run_id, worker_id)})"
            driver.worker_lost(worker_id, message, final_code=final_code)

    def worker_replaced(self, run_id: str, worker_id: str) -> None:
        """Notifies the driver that another process registered under a worker's id."""
        if (driver := self.find(run_id)) is not None:
            driver.worker_lost(worker_id, f"{worker_id} was restarted", is_replaced=True)

    async def worker_reported(
        self, worker: Worker, kind: str, message: str, *, step: int = 0, key: str = ""
    ) -> None:
        """Records an event of the run that one of its workers reports.

        Args:
            kind: One of ``WORKER_EVENTS``.
            step: Training step that it is about; 0 for none.
            key: Identity of what happened, which is recorded once; empty for what may happen again.
        """
        data = {"worker": worker.worker_id, "step": step, "key": key}
        note = Note(
            kind,
            f"{worker.worker_id}: {message}",
            {name: value for name, value in data.items() if value},
        )
        if (driver := self.find(worker.run_id)) is not None:
            await driver.record_event(note, key=key)

    def host_drained(self, run_id: str, host: DrainedHost, worker_ids: Collection[str]) -> None:
        """Notifies the driver that workers must leave a host; repeated as long as they have not left."""
        if (driver := self.find(run_id)) is not None:
            driver.host_drained(host, worker_ids)

    def host_in_service(self, host: str) -> None:
        """Notifies all drivers that a drained host is in service again."""
        for driver in self._drivers.values():
            if (note := driver.host_in_service(host)) is not None:
                self.tasks.create_task(driver.record_event(note))

    def worker_pending(self, run_id: str, reason: str, message: str) -> None:
        """Records, as an event of the run, why a worker cannot start yet."""
        note = Note("WorkerPending", f"{reason}: {message}", {"reason": reason})
        if (driver := self.find(run_id)) is not None:
            self.tasks.create_task(driver.record_event(note))
