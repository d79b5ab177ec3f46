"""Brings a run to the rollouts that it should have, while it goes on.

more    the new ones are started and load while the others generate -> they get weights, then groups
lost    its replacement loads while the others generate             -> as above
fewer   what they have not finished is stored, the loop is left, they are ended -> entered again

Where trainer and rollouts take turns, or weights have to take another way to reach new ones, the loop is
left and entered with all.
"""

import asyncio
import logging
from collections.abc import Collection

from services.common.errors import ServiceError
from services.common.spec.run import RunSpec
from services.common.task_group import TaskGroup, leaves
from services.controller.launch.launcher import Launcher, WorkerExit, worker_names
from services.controller.membership.registry import Membership
from services.controller.run.assembly import is_loaded
from services.controller.run.journal import Journal
from services.controller.run.live import LiveRun
from services.controller.run.losses import WorkerLostError
from services.controller.run.requests import CurrentSpec, Mailbox
from services.controller.store.records import Note

logger = logging.getLogger(__name__)


class ResizedError(Exception):
    """The run's workers are others now; its loop must be entered again."""


class Resizing:
    """Brings a run to the number of rollouts that its specification asks for.

    Args:
        run_id: The run.
        spec: Its specification, as it is now.
        launcher: Starts and ends workers.
        membership: Where they register.
        journal: The run's record.
        mailbox: Holds the request for another size.
    """

    def __init__(
        self,
        run_id: str,
        spec: CurrentSpec,
        *,
        launcher: Launcher,
        membership: Membership,
        journal: Journal,
        mailbox: Mailbox,
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._launcher = launcher
        self._membership = membership
        self._journal = journal
        self._mailbox = mailbox
        self._asked = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""
        self._new: set[str] = set()

    def ask(self) -> None:
        """The specification has changed."""
        self._asked.set()

    def takes_exit(self, exit_: WorkerExit) -> bool:
        """Whether a worker that ended is one that the run does not need yet."""
        if exit_.worker_id not in self._new:
            return False
        self._failure = f"{exit_.worker_id} ended: {exit_.last_lines}"
        self._failed.set()
        return True

    async def watch(
        self, entered: RunSpec, *, absent: Collection[str] = (), live: asyncio.Future[LiveRun]
    ) -> None:
        """Get the rollouts that are wanted ready, while the run goes on with others.

        If new ones do not come up, the run keeps the size that it has.

        Args:
            entered: What the loop was entered with.
            absent: Rollouts of it that were lost; the loop was entered without them.
            live: The run, once the loop is entered.

        Raises:
            ResizedError: Once the loop can be entered with all that are wanted, if it has to be.
            ServiceError: If a replacement does not come up.
        """
        here = _rollouts(entered) - set(absent)
        while True:
            self._asked.clear()
            spec = self._spec.now
            self._new = _rollouts(spec) - _rollouts(entered)
            if missing := _rollouts(spec) - here:
                if not await self._bring_up(missing, live):
                    size = {"replicas": entered.rollout.replicas}
                    rollout = self._spec.now.rollout.model_copy(update=size)
                    self._spec.now = self._spec.now.model_copy(update={"rollout": rollout})
                    continue
                here |= missing
                entered = spec
            if leaving := here - self._wanted():
                if live.done() and not spec.topology.takes_turns:
                    await live.result().generation.hand_over(leaving)
                raise ResizedError
            await self._asked.wait()
            if self._wanted() == here:
                await self.confirm()

    async def confirm(self) -> None:
        """The run has the size that was asked for, if one was."""
        if self._mailbox.get("resize") is not None:
            await self._tell("Resized")

    async def settle(self) -> dict[str, str]:
        """End rollouts that are too many; returns what was ended, with why."""
        workers = self._membership.workers(self._run_id, "rollout")
        gone = {worker.worker_id for worker in workers} - self._wanted()
        await self._end(gone)
        await self._tell("Resized" if gone or self._new else "Replaced")
        self._new = set()
        return dict.fromkeys(gone, "was one too many")

    def absent(self) -> set[str]:
        """Rollouts that have yet to load, if others can go on without them."""
        loaded, wanted = self._loaded(), self._wanted()
        missing = wanted - loaded
        # One that takes turns has no GPU to load on beside the trainer.
        has_to_wait = any(map(self._spec.now.is_in_turns, missing))
        return missing if wanted & loaded and not has_to_wait else set()

    async def _tell(self, kind: str) -> None:
        count, request = self._spec.now.rollout.replicas, self._mailbox.get("resize")
        note = Note(kind, f"{count} rollouts", {"replicas": count})
        await self._journal.note(note, also=self._mailbox.done(request))

    async def _bring_up(self, missing: set[str], live: asyncio.Future[LiveRun]) -> bool:
        """Start rollouts and have them take part; whether they came up.

        Raises:
            ResizedError: If they have loaded, and the loop has to be entered with them.
        """
        self._failed.clear()
        request = self._mailbox.get("resize")
        try:
            await self._load(missing)
            if self._spec.now.topology.takes_turns or not missing <= self._wanted():
                raise ResizedError
            loaded = [w for w in self._membership.workers(self._run_id) if w.worker_id in missing]
            publishing = (await live).publishing
            if not await publishing.admit(loaded):
                raise ResizedError
        except (ServiceError, ExceptionGroup) as error:
            if not self._new:
                raise
            why = "; ".join(str(leaf) for leaf in leaves(error))
            logger.warning("new rollouts did not start", extra={"run": self._run_id, "why": why})
            note = Note("ResizeFailed", why, {"workers": sorted(self._new)})
            await self._journal.note(note, also=self._mailbox.done(request))
            await self._end(self._new)
            self._new = set()
            return False
        kind, self._new = "Resized" if self._new else "Replaced", set()
        await publishing.all_serve()
        await self._tell(kind)
        return True

    async def _load(self, missing: set[str]) -> None:
        spec = self._spec.now

        def unloaded() -> list[str]:
            return sorted(missing - self._loaded())

        await self._launcher.start(self._run_id, spec)
        async with TaskGroup() as tasks:
            failing = tasks.create_task(self._fail_on_exit())
            await self._membership.wait_until(
                lambda: not unloaded(),
                timeout_s=spec.limits.start_timeout_s,
                waiting_for=lambda: f"{', '.join(unloaded())} to load",
            )
            failing.cancel()

    async def _fail_on_exit(self) -> None:
        await self._failed.wait()
        raise WorkerLostError(self._failure)

    async def _end(self, names: set[str]) -> None:
        for worker_id in sorted(names):
            await self._launcher.end(self._run_id, worker_id)
            await self._membership.forget(self._run_id, worker_id)

    def _wanted(self) -> set[str]:
        return _rollouts(self._spec.now)

    def _loaded(self) -> set[str]:
        workers = self._membership.workers(self._run_id, "rollout")
        return {worker.worker_id for worker in workers if is_loaded(worker, self._spec.now)}


def _rollouts(spec: RunSpec) -> set[str]:
    return {name for role, name in worker_names(spec) if role == "rollout"}
