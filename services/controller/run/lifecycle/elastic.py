"""Brings a run to the rollouts that it should have, while it goes on.

more    the new ones are started and load while the others generate   -> they get weights, then groups
lost    its replacement loads while the others generate               -> as above
fewer   others take over what they have not finished, or begin it again -> they are ended

The loop is left, and entered with all, where weights have to take another way to reach new ones, and where
one leaves that the loop still waits for.
"""

import asyncio
import logging
from collections.abc import Collection

import sqlalchemy as sa

from services.common.errors import ServiceError
from services.common.runspec.run import RunSpec
from services.common.task_group import leaves, until_first
from services.controller.launch.launcher import Launcher, WorkerExit, worker_names
from services.controller.membership.registry import Membership
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
    """The run's workers are others now; its loop must be entered again."""


class ElasticSizing:
    """Brings a run to the number of rollouts that its specification asks for.

    Args:
        run_id: The run.
        spec: Its specification, as it is now.
        launcher: Starts and ends workers.
        membership: Where they register.
        journal: The run's record.
        request_queue: Holds the request for another size.
    """

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
        self._asked = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""
        self._size = _rollouts(spec.now)
        self._started: set[str] = set()

    def begin(self) -> None:
        """The mailbox is open: it may hold a request that an earlier controller did not fulfil."""
        if (request := self._request_queue.get("resize")) is not None:
            has = request.options.get("has", len(self._size))
            self._size = _rollouts(with_replicas(self._spec.now, has))

    @property
    def size(self) -> int:
        """Rollouts that the run has, or had before some were lost: others that are asked for may not come."""
        return len(self._size)

    def sure(self) -> RunSpec:
        """The specification without rollouts that are asked for and may not come."""
        return with_replicas(self._spec.now, len(self._wanted() & self._size))

    def ask(self) -> None:
        """The specification has changed."""
        self._asked.set()

    def takes_exit(self, exit_: WorkerExit) -> bool:
        """Whether a worker that ended is one that the run does not need yet, or any more."""
        if exit_.worker_id in self._new():
            self._failure = f"{exit_.worker_id} ended: {exit_.last_lines}"
            self._failed.set()
            return True
        return exit_.worker_id.startswith("rollout-") and exit_.worker_id not in self._wanted()

    async def watch(
        self, present: Collection[str], *, pipeline: asyncio.Future[TrainingPipeline]
    ) -> None:
        """Get the rollouts that are wanted to take part, and no others, while the run goes on.

        If new ones do not come up, the run keeps the size that it has.

        Args:
            present: Rollouts that the loop was entered with.
            pipeline: The run, once the loop is entered.

        Raises:
            ResizedError: Once the loop can be entered with all that are wanted, if it has to be.
            ServiceError: If a replacement does not come up.
        """
        here, has_left = set(present), False
        while True:
            self._asked.clear()
            wanted, request = self._wanted(), self._request_queue.get("resize")
            if leaving := here - wanted:
                if not pipeline.done():
                    raise SizeChangedError
                await pipeline.result().detach(leaving)
            # Some may have been about to leave when the loop was left.
            if gone := (here | self._started | self._size) - wanted:
                has_left |= not gone.isdisjoint(self._size)
                await self._end(gone)
                here -= gone
                self._started -= gone
                self._size -= gone
                await self._start(pipeline)  # platforms show how many there are
            if missing := wanted - here:
                if await self._bring_up(missing, pipeline, request):
                    here |= missing
                continue
            if pipeline.done() and (has_left or request is not None):
                await self._tell("Resized", len(wanted), request)
            has_left = False
            await self._asked.wait()

    async def confirm(self) -> None:
        """The loop is entered with the size that was asked for, if one was."""
        if (request := self._request_queue.get("resize")) is not None:
            await self._tell("Resized", len(self._wanted()), request)

    async def settle(self) -> dict[str, str]:
        """End rollouts that are too many; returns what was ended, with why."""
        workers = self._membership.workers(self._run_id, "rollout")
        known = {worker.worker_id for worker in workers} | self._started | self._size
        gone = known - self._wanted()
        await self._end(gone)
        kind = "Replaced" if self._size == self._wanted() else "Resized"
        self._size = self._wanted()
        await self._tell(kind, self.size, self._request_queue.get("resize"))
        return dict.fromkeys(gone, "was one too many")

    def absent(self) -> set[str]:
        """Rollouts that have yet to load, if others can go on without them."""
        loaded, wanted = self._loaded(), self._wanted()
        missing = wanted - loaded
        # One that takes turns has no GPU to load on beside the trainer.
        has_to_wait = any(map(self._spec.now.is_colocated, missing))
        return missing if wanted & loaded and not has_to_wait else missing & self._new()

    def present(self) -> set[str]:
        """Those with which the loop can be entered, once they have loaded."""
        return self._wanted() - self.absent()

    async def _tell(self, kind: str, count: int, request: Request | None) -> None:
        note = Note(kind, f"{count} rollouts", {"replicas": count})
        await self._journal.note(note, also=self._request_queue.done(request))

    async def _bring_up(
        self, missing: set[str], pipeline: asyncio.Future[TrainingPipeline], request: Request | None
    ) -> bool:
        """Start rollouts and have them take part; whether they do: others may be wanted by then.

        Raises:
            ResizedError: If they have loaded, and the loop has to be entered with them.
        """
        self._failed.clear()
        self._started |= missing
        asked = self._spec.now.rollout.replicas
        try:
            await self._load(missing, pipeline)
            if not missing <= self._wanted() & self._loaded():
                return False
            loaded = [w for w in self._membership.workers(self._run_id) if w.worker_id in missing]
            if not await (await pipeline).admit(loaded):
                raise SizeChangedError
        except (ServiceError, ExceptionGroup) as error:
            if not missing & self._new():
                raise
            why = "; ".join(str(leaf) for leaf in leaves(error))
            await self._keep_size(why, asked=asked, request=request)
            return False
        self._started -= missing
        kind = "Replaced" if missing <= self._size else "Resized"
        self._size |= missing
        await pipeline.result().publisher.all_serve()
        await self._tell(kind, asked, request)
        return True

    async def _keep_size(self, why: str, *, asked: int, request: Request | None) -> None:
        """Rollouts that were asked for do not come up: those that are there are all that are wanted."""
        logger.warning("new rollouts did not start", extra={"run": self._run_id, "why": why})
        if self._spec.now.rollout.replicas == asked:
            self._spec.now = with_replicas(self._spec.now, self.size)
        done = self._request_queue.done(request)
        back = restore_size(self._run_id, asked=asked, has=self.size)

        def write(connection: sa.Connection) -> None:
            back(connection)
            done(connection)

        names = sorted(self._started - self._size)
        note = Note("ResizeFailed", why, {"workers": names, "replicas": self.size})
        await self._journal.note(note, also=write)

    async def _start(self, pipeline: asyncio.Future[TrainingPipeline]) -> None:
        if self._spec.now.topology.is_colocated:
            await pipeline  # until then each worker starts while the others sleep
        await self._launcher.start(self._run_id, self._spec.now)

    async def _load(self, missing: set[str], pipeline: asyncio.Future[TrainingPipeline]) -> None:
        """Return when rollouts have loaded, or another number of them is wanted."""

        def unloaded() -> list[str]:
            return sorted(missing - self._loaded())

        await self._start(pipeline)
        await until_first(
            self._membership.wait_until(
                lambda: not unloaded(),
                timeout_s=lambda: self._spec.now.limits.start_timeout_s,
                waiting_for=lambda: f"{', '.join(unloaded())} to load",
            ),
            self._fail_on_exit(),
            self._asked.wait(),
        )

    async def _fail_on_exit(self) -> None:
        await self._failed.wait()
        raise WorkerLostError(self._failure)

    async def _end(self, names: set[str]) -> None:
        for worker_id in sorted(names):
            await self._launcher.end(self._run_id, worker_id)
            await self._membership.forget(self._run_id, worker_id)

    def _wanted(self) -> set[str]:
        return _rollouts(self._spec.now)

    def _new(self) -> set[str]:
        """Rollouts that are asked for and were never there."""
        return self._wanted() - self._size

    def _loaded(self) -> set[str]:
        workers = self._membership.workers(self._run_id, "rollout")
        return {worker.worker_id for worker in workers if is_loaded(worker, self._spec.now)}


def _rollouts(spec: RunSpec) -> set[str]:
    return {name for role, name in worker_names(spec) if role == "rollout"}
