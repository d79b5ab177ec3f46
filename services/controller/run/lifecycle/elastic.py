"""Changes the number of rollouts of a run while it runs, and replaces lost ones.

::

    more rollouts    new ones start and load while the others generate; they receive weights, then groups;
                     those that a queue holds back follow when it admits them
    lost rollouts    replacements load while the others generate; then as above
    fewer rollouts   other rollouts continue or restart the unfinished groups; then workers are ended
    drained hosts    as with fewer rollouts; then as with lost ones, on other hosts

The loops are left and entered with all rollouts if new ones need another weight transport, or if a
rollout is removed while the loops are not entered yet.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import sqlalchemy as sa

from services.common.errors import ServiceError
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import worker_names
from services.common.task_group import leaves, until_first
from services.controller.launch.launcher import Launcher, WorkerExit
from services.controller.membership import Membership
from services.controller.run.connections import is_loaded
from services.controller.run.pipeline import TrainingPipeline
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import (
    CurrentSpec,
    RequestQueue,
    restore_size,
    with_replicas,
)
from services.controller.run.state.worker_failures import WorkerLostError
from services.controller.store.records import Note
from services.controller.store.rows import Request

logger = logging.getLogger(__name__)


class SizeChangedError(Exception):
    """Raised if the run's workers have changed and its loops must be entered again."""


class ElasticSizing:
    """Brings a run to the number of rollouts in its specification."""

    def __init__(
        self,
        run_id: str,
        spec: CurrentSpec,
        *,
        launcher: Launcher,
        membership: Membership,
        journal: Journal,
        request_queue: RequestQueue,
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._launcher = launcher
        self._membership = membership
        self._journal = journal
        self._request_queue = request_queue
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""
        self._size = _rollouts(spec.now)
        self._started: set[str] = set()
        self._exited: set[str] = set()
        """Rollouts that exited before they joined, and may still be registered."""
        self.on_left: Callable[[Collection[str]], Awaitable[None]]
        """Called with rollouts that have left their hosts."""
        self._moving: set[str] = set()
        """Rollouts that must leave their hosts."""

    def resume_request(self) -> None:
        """Resumes a resize request that an earlier controller did not complete."""
        if (request := self._request_queue.get("resize")) is not None:
            has = request.options.get("has", len(self._size))
            self._size = _rollouts(with_replicas(self._spec.now, has))

    @property
    def size(self) -> int:
        """Number of rollouts, lost ones included, without those that are requested and not running yet."""
        return len(self._size)

    def startable_spec(self) -> RunSpec:
        """Returns the specification without the requested rollouts that never ran and may fail to start."""
        return with_replicas(self._spec.now, len(self._wanted() & self._size))

    def notify(self) -> None:
        """Wakes the watcher after the specification changed."""
        self._changed.set()

    def move(self, names: Collection[str]) -> None:
        """Lets rollouts leave their hosts; others continue the groups until replacements have joined."""
        self._moving |= set(names)
        self._changed.set()

    def stay(self, names: Collection[str]) -> None:
        """Lets rollouts stay that have not left yet."""
        self._moving -= set(names)

    def handles_exit(self, exit_: WorkerExit) -> bool:
        """Records the exit of a new rollout; returns True if the worker is a new or surplus rollout."""
        if exit_.worker_id in self._new():
            self._failure = exit_.report()
            self._failed.set()
            self._exited.add(exit_.worker_id)
            return True
        return exit_.worker_id.startswith("rollout-") and exit_.worker_id not in self._wanted()

    async def watch(
        self, present: Collection[str], *, pipeline: asyncio.Future[TrainingPipeline]
    ) -> None:
        """Adds missing rollouts and removes surplus ones until it is cancelled.

        If new rollouts fail to start, the run keeps its size.

        Args:
            present: Rollouts with which the loops were entered.
            pipeline: Pipeline of the run; done once the loops are entered.

        Raises:
            SizeChangedError: If the loops have to be entered again.
            ServiceError: If a replacement does not start.
        """
        present_workers, has_left = set(present), False
        while True:
            self._changed.clear()
            wanted_workers, request = self._wanted(), self._request_queue.get("resize")
            if leaving := present_workers - wanted_workers:
                if not pipeline.done():
                    raise SizeChangedError
                await pipeline.result().detach(leaving)
            # Some rollouts may have been leaving when the loops were left.
            if surplus := (present_workers | self._started | self._size) - wanted_workers:
                has_left |= not surplus.isdisjoint(self._size)
                await self._end(surplus)
                present_workers -= surplus
                self._started -= surplus
                self._size -= surplus
                await self._start(pipeline)  # platforms display the new number of rollouts
            if pipeline.done() and (moving := self._moving & wanted_workers):
                await pipeline.result().detach(moving & present_workers)
                await self._launcher.release(self._run_id, moving)
                for worker_id in sorted(moving):
                    await self._membership.unregister(self._run_id, worker_id)
                present_workers -= moving
                self._moving -= moving
                await self.on_left(moving)
            if missing_workers := wanted_workers - present_workers:
                present_workers |= await self._add_rollouts(missing_workers, pipeline, request)
                continue
            if pipeline.done() and (has_left or request is not None):
                await self._report("Resized", len(wanted_workers), request)
            has_left = False
            await self._changed.wait()

    async def confirm(self) -> None:
        """Reports a pending resize request as done once the loops are entered with that size."""
        if (request := self._request_queue.get("resize")) is not None:
            await self._report("Resized", len(self._wanted()), request)

    async def remove_surplus(self) -> dict[str, str]:
        """Ends surplus rollouts before the loops are entered again; returns them with the cause."""
        workers = self._membership.workers(self._run_id, "rollout")
        present = {worker.worker_id for worker in workers} | self._started | self._size
        surplus = present - self._wanted()
        await self._end(surplus)
        kind = "Replaced" if self._size == self._wanted() else "Resized"
        queued = self._wanted() & set(self._launcher.queued(self._run_id))
        self._size = self._wanted() - (queued - self._size)
        count, request = len(self._wanted() - queued), self._request_queue.get("resize")
        await self._report(kind, count, request, absent=queued)
        return dict.fromkeys(surplus, "was removed")

    def missing_rollouts(self) -> set[str]:
        """Returns the rollouts that have not loaded and for which the run does not wait."""
        loaded, wanted_workers = self._loaded(), self._wanted()
        missing_workers = wanted_workers - loaded
        # A colocated rollout has no free GPU on which to load while the trainer runs.
        has_to_wait = any(map(self._spec.now.is_colocated, missing_workers))
        if wanted_workers & loaded and not has_to_wait:
            return missing_workers
        return missing_workers & (self._new() | set(self._launcher.queued(self._run_id)))

    def present(self) -> set[str]:
        """Returns the rollouts with which the loops are entered, once they have loaded."""
        return self._wanted() - self.missing_rollouts()

    async def _report(
        self, kind: str, count: int, request: Request | None, *, absent: Collection[str] = ()
    ) -> None:
        """Reports a new number of rollouts, and the request as done if none is absent."""
        names, also = sorted(absent), self._request_queue.done(request)
        if names and request is not None:  # a later controller continues with those that joined
            also = self._request_queue.added("resize", has=self.size)
        message = f"{count} rollout{'' if count == 1 else 's'}"
        message += f"; in a queue: {', '.join(names)}" if names else ""
        note = Note(kind, message, {"replicas": count, "absent": names})
        await self._journal.record_event(note, also=also)

    async def _add_rollouts(
        self,
        missing_workers: set[str],
        pipeline: asyncio.Future[TrainingPipeline],
        request: Request | None,
    ) -> set[str]:
        """Starts rollouts and adds to the run those that no queue holds back.

        Returns:
            The added rollouts; none if they are not wanted any more.

        Raises:
            SizeChangedError: If they have loaded and the loops have to be entered with them.
        """
        self._failed.clear()
        while self._exited:
            await self._membership.unregister(self._run_id, self._exited.pop())
        self._started |= missing_workers
        num_replicas = self._spec.now.rollout.replicas
        try:
            joining = await self._load(missing_workers, pipeline)
            if not joining or not joining <= self._wanted() & self._loaded():
                return set()
            loaded = [w for w in self._membership.workers(self._run_id) if w.worker_id in joining]
            if not await (await pipeline).admit(loaded):
                raise SizeChangedError
        except (ServiceError, ExceptionGroup) as error:
            if not missing_workers & self._new():
                raise
            why = "; ".join(str(leaf) for leaf in leaves(error))
            await self._keep_size(why, replicas=num_replicas, request=request)
            return set()
        self._started -= joining
        kind = "Replaced" if joining <= self._size else "Resized"
        self._size |= joining
        await pipeline.result().publisher.wait_all_serve()
        absent = missing_workers - joining
        await self._report(kind, num_replicas - len(absent), request, absent=absent)
        return joining

    async def _keep_size(self, why: str, *, replicas: int, request: Request | None) -> None:
        """Keeps the current size after requested rollouts failed to start."""
        logger.warning("new rollouts did not start", extra={"run": self._run_id, "why": why})
        if self._spec.now.rollout.replicas == replicas:
            self._spec.now = with_replicas(self._spec.now, self.size)
        settle = self._request_queue.done(request)
        back = restore_size(self._run_id, replicas=replicas, has=self.size)

        def write(connection: sa.Connection) -> None:
            back(connection)
            settle(connection)

        names = sorted(self._started - self._size)
        note = Note("ResizeFailed", why, {"workers": names, "replicas": self.size})
        await self._journal.record_event(note, also=write)

    async def _start(self, pipeline: asyncio.Future[TrainingPipeline]) -> None:
        if self._spec.now.topology.is_colocated:
            await pipeline  # until then, workers start one by one while the others sleep
        await self._launcher.start(self._run_id, self._spec.now)

    async def _load(
        self, missing_workers: set[str], pipeline: asyncio.Future[TrainingPipeline]
    ) -> set[str]:
        """Waits until rollouts have loaded, or the specification changes.

        Returns:
            The rollouts that no queue held back; none if the queue held all of them back.
        """
        joining: set[str] = set()

        def unloaded() -> list[str]:
            return sorted(joining - self._loaded())

        async def load() -> None:
            joining.update(await self._launcher.admitted(self._run_id, missing_workers))
            await self._membership.wait_until(
                lambda: not unloaded(),
                timeout_s=lambda: self._spec.now.limits.start_timeout_s,
                waiting_for=lambda: (
                    f"{', '.join(unloaded())} to load; see their logs, or raise "
                    "limits.start_timeout_s"
                ),
            )

        await self._start(pipeline)
        await until_first(load(), self._fail_on_exit(), self._changed.wait())
        return joining

    async def _fail_on_exit(self) -> None:
        await self._failed.wait()
        raise WorkerLostError(self._failure)

    async def _end(self, names: set[str]) -> None:
        for worker_id in sorted(names):
            await self._launcher.end(self._run_id, worker_id)
            await self._membership.unregister(self._run_id, worker_id)
        self._exited -= names
        self.stay(names)
        await self.on_left(names)

    def _wanted(self) -> set[str]:
        return _rollouts(self._spec.now)

    def _new(self) -> set[str]:
        """Returns rollouts that are requested and never ran."""
        return self._wanted() - self._size

    def _loaded(self) -> set[str]:
        workers = self._membership.workers(self._run_id, "rollout")
        return {worker.worker_id for worker in workers if is_loaded(worker, self._spec.now)}


def _rollouts(spec: RunSpec) -> set[str]:
    return {name for role, name in worker_names(spec) if role == "rollout"}
