"""Brings a run to the rollouts that it should have, while it goes on.

more    the new ones are started and load while the others generate -> the loop is left and entered with all
lost    its replacement loads while the others generate             -> as above
fewer   the loop is left, those that are too many are ended -> entered again; their groups are made anew
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from services.common.errors import ServiceError
from services.common.spec.run import RunSpec
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import Launcher, WorkerExit, worker_names
from services.controller.membership import Membership
from services.controller.run.journal import Journal
from services.controller.run.losses import WorkerLostError, leaves
from services.controller.store.records import Note

logger = logging.getLogger(__name__)


class ResizedError(Exception):
    """The run's workers are others now; its loop must be entered again."""


class Resizing:
    """Brings a run to the number of rollouts that its specification asks for.

    Args:
        run_id: The run.
        launcher: Starts and ends workers.
        membership: Where they register.
        journal: The run's record.
    """

    def __init__(
        self, run_id: str, *, launcher: Launcher, membership: Membership, journal: Journal
    ) -> None:
        self._run_id = run_id
        self._launcher = launcher
        self._membership = membership
        self._journal = journal
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
        self,
        current: RunSpec,
        wanted: Callable[[], RunSpec],
        give_up: Callable[[], None],
        *,
        absent: Collection[str] = (),
    ) -> None:
        """Get the rollouts that are wanted ready, while the run goes on with others.

        Args:
            current: What the loop was entered with.
            wanted: What is asked for now.
            give_up: Called when new rollouts do not come up: the run keeps the size that it has.
            absent: Rollouts of ``current`` that were lost; the loop was entered without them.

        Raises:
            ResizedError: Once the loop can be entered with all that are wanted.
            ServiceError: If a replacement does not come up.
        """
        while True:
            self._asked.clear()
            if absent or _rollouts(wanted()) != _rollouts(current):
                self._new = _rollouts(wanted()) - _rollouts(current)
                if await self._bring_up(wanted()):
                    raise ResizedError
                give_up()
            await self._asked.wait()

    async def settle(self, spec: RunSpec) -> dict[str, str]:
        """End rollouts that are too many; returns what was ended, with why."""
        workers = self._membership.workers(self._run_id, "rollout")
        gone = {worker.worker_id for worker in workers} - _rollouts(spec)
        await self._end(gone)
        count = spec.rollout.replicas
        kind = "Resized" if gone or self._new else "Replaced"
        self._new = set()
        await self._journal.note(Note(kind, f"{count} rollouts", {"replicas": count}))
        return dict.fromkeys(gone, "was one too many")

    def absent(self, spec: RunSpec) -> set[str]:
        """Rollouts that have yet to load, if others can go on without them."""
        loaded, wanted = self._loaded(), _rollouts(spec)
        return wanted - loaded if wanted & loaded else set()

    async def _bring_up(self, spec: RunSpec) -> bool:
        """Start the rollouts that are missing; whether they loaded."""
        self._failed.clear()

        def missing() -> list[str]:
            return sorted(_rollouts(spec) - self._loaded())

        try:
            await self._launcher.start(self._run_id, spec)
            async with TaskGroup() as tasks:
                failing = tasks.create_task(self._fail_on_exit())
                await self._membership.wait_until(
                    lambda: not missing(),
                    timeout_s=spec.limits.start_timeout_s,
                    waiting_for=lambda: f"{', '.join(missing())} to load",
                )
                failing.cancel()
        except (ServiceError, ExceptionGroup) as error:
            if not self._new:
                raise
            why = "; ".join(str(leaf) for leaf in leaves(error))
            logger.warning("new rollouts did not start", extra={"run": self._run_id, "why": why})
            await self._journal.note(Note("ResizeFailed", why, {"workers": sorted(self._new)}))
            await self._end(self._new)
            self._new = set()
            return False
        return True

    async def _fail_on_exit(self) -> None:
        await self._failed.wait()
        raise WorkerLostError(self._failure)

    async def _end(self, names: set[str]) -> None:
        for worker_id in sorted(names):
            await self._launcher.end(self._run_id, worker_id)
            await self._membership.forget(self._run_id, worker_id)

    def _loaded(self) -> set[str]:
        workers = self._membership.workers(self._run_id, "rollout")
        return {worker.worker_id for worker in workers if worker.state in ("loaded", "ready")}


def _rollouts(spec: RunSpec) -> set[str]:
    return {name for role, name in worker_names(spec) if role == "rollout"}
