"""The rollouts of one run: where a group goes, and how it gets there."""

import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from statistics import fmean

from services.common.errors import ServiceError, UnavailableError
from services.common.rpc.client import open_channel
from services.common.task_group import TaskGroup, unwrapped
from services.controller.membership.registry import Worker
from services.controller.planning.measured import DECODE_TIMES
from services.controller.rules.placement import Placement
from services.rollout.client import GroupAssignment, RolloutClient

logger = logging.getLogger(__name__)


class RolloutPool:
    """Connected rollouts."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._clients: dict[str, RolloutClient] = {}
        self._workers: dict[str, Worker] = {}
        self._placement = Placement()
        self._in_turns: frozenset[str] = frozenset()
        self._lent: set[str] = set()
        self._behind: set[str] = set()
        self._leaving: set[str] = set()
        self._progress: dict[str, tuple[float, float]] = {}

    async def open(self, workers: Iterable[Worker], *, in_turns: Iterable[str] = ()) -> None:
        """Connect to the rollouts, of which some take turns with the trainer on its GPUs."""
        self._in_turns = frozenset(in_turns)
        for worker in workers:
            await self._connect(worker)

    async def join(self, workers: Iterable[Worker]) -> None:
        """Connect to further rollouts; they get groups once they serve what the others serve."""
        for worker in workers:
            await self._connect(worker)
            self._behind.add(worker.worker_id)
            self._placement.send_away(worker.worker_id)

    def detach(self, names: Iterable[str]) -> None:
        """Rollouts that are about to leave get no more work."""
        for name in names:
            self._leaving.add(name)
            self._placement.send_away(name)

    def detach_ending(self) -> None:
        """Rollouts that were told to end from outside get no more work: they refuse it."""
        ending = [name for name, worker in self._workers.items() if worker.state == "draining"]
        self.detach(name for name in ending if name not in self._leaving)

    def leave(self, names: Iterable[str]) -> None:
        """Forget rollouts that have nothing to do any more."""
        for name in names:
            for known in (self._clients, self._workers, self._progress):
                known.pop(name, None)
            self._behind.discard(name)
            self._leaving.discard(name)
            self._placement.remove(name)

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    def serves(self, worker_id: str) -> bool:
        """Whether a rollout is connected and has weights."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.weight_version >= 0

    def newest_version(self) -> int:
        """The newest weight version that a rollout serves; -1 before the first."""
        return max((worker.weight_version for worker in self._workers.values()), default=-1)

    @property
    def num_replicas(self) -> int:
        """Rollouts that may get training groups."""
        return self._placement.num_present

    def present(self) -> list[str]:
        """Rollouts that serve the newest weights and may get any work."""
        others = self._lent | self._behind | self._leaving
        return [name for name in self._clients if name not in others]

    def has_loans(self, names: Iterable[str]) -> bool:
        """Whether one of some rollouts is out of training for a while."""
        return not self._lent.isdisjoint(names)

    def lend(self, count: int) -> list[str]:
        """Take up to ``count`` rollouts out of training, which keeps at least one; returns their names.

        Those that never sleep go first.
        """
        present = sorted(self.present(), key=self._in_turns.__contains__)
        lent = present[: max(0, min(count, len(present) - 1))]
        for name in lent:
            self._placement.send_away(name)
        self._lent.update(lent)
        return lent

    def take_back(self, names: Sequence[str]) -> None:
        """Lent rollouts may train again, once they serve what the others serve."""
        self._lent.difference_update(names)
        self._behind.update(names)
        self.bring_back()

    def bring_back(self) -> None:
        """Rollouts that have caught up with the others train again."""
        newest = self.newest_version()
        for name in [n for n in self._behind if self._workers[n].weight_version == newest]:
            self._behind.discard(name)
            if name not in self._leaving:
                self._placement.bring_back(name)

    def idle_seconds(self) -> dict[str, float]:
        """Seconds that each rollout has been without work so far."""
        return {
            name: worker.gauges.get("idle_seconds", 0.0) for name, worker in self._workers.items()
        }

    def tokens_total(self) -> float:
        """Tokens generated so far."""
        return sum(worker.gauges.get("tokens_total", 0.0) for worker in self._workers.values())

    def decode_times(self) -> dict[str, float]:
        """What a decode step takes, on average over the rollouts; nothing before they have decoded."""
        known = [worker.gauges for worker in self._workers.values()]
        known = [gauges for gauges in known if gauges.keys() >= set(DECODE_TIMES)]
        return {name: fmean(gauges[name] for gauges in known) for name in DECODE_TIMES if known}

    def moved_at(self, worker_id: str, *, now: float) -> float:
        """When a rollout was first seen with as many tokens as it has now, in monotonic seconds."""
        worker = self._workers.get(worker_id)
        tokens = worker.gauges.get("tokens_total", 0.0) if worker is not None else 0.0
        known, since = self._progress.get(worker_id, (-1.0, now))
        since = since if tokens == known else now
        self._progress[worker_id] = (tokens, since)
        return since

    def choose(self, holder: str, *, room: int) -> tuple[str, int]:
        """The rollout for a group, and the weight version it serves.

        Args:
            holder: The rollout that had the group before; empty if none had.
            room: Groups that a rollout has places for.

        Raises:
            UnavailableError: If there is none.
        """
        worker_id = self._placement.choose(holder, room=room)
        if worker_id is None:
            raise UnavailableError("no rollout is connected, so no group can start")
        return worker_id, self._workers[worker_id].weight_version

    def choose_several(self, count: int) -> tuple[list[str], int]:
        """Up to ``count`` rollouts for the shares of a group, and the oldest weight version they serve.

        Raises:
            UnavailableError: If there is none.
        """
        names = self._placement.least_loaded(count)
        if not names:
            raise UnavailableError("no rollout is connected, so no group can start")
        return names, min(self._workers[name].weight_version for name in names)

    def assigned(self, worker_id: str) -> None:
        """A group was assigned to a rollout."""
        self._placement.assigned(worker_id)

    def finished(self, worker_id: str) -> None:
        """A group of a rollout ended."""
        self._placement.finished(worker_id)

    async def start(self, by_worker: dict[str, list[GroupAssignment]]) -> None:
        """Hand groups to the rollouts that they were assigned to, but for those that leave meanwhile."""
        async with TaskGroup() as tasks:
            for worker_id, groups in by_worker.items():
                tasks.create_task(self._start(worker_id, groups))

    async def _start(self, worker_id: str, groups: Sequence[GroupAssignment]) -> None:
        try:
            if (client := self._clients.get(worker_id)) is not None:
                await client.start_groups(groups)
        except ServiceError:
            if worker_id in self._clients.keys() - self._leaving:
                raise

    async def interrupt(self, names: Sequence[str] | None = None) -> None:
        """Stop the groups of some rollouts, or of all; what they have is cached, and each is reported."""
        clients = [self._clients[name] for name in (self._clients if names is None else names)]
        await self._all_answer(client.interrupt_groups() for client in clients)

    async def park_for_others(self) -> None:
        """Before some rollouts sleep: have those that do not go on with what they have not finished.

        Where all sleep, groups wait where they are.
        """
        if not self._in_turns.issuperset(self.present()):
            for name in self._in_turns:
                self._placement.send_away(name)
            await self.interrupt([*self._in_turns])

    async def sleep(self, *, timeout_s: float) -> None:
        """Have the engines that take turns give their GPU memory up; groups that they have wait there.

        Raises:
            ServiceError: If a rollout does not answer.
        """
        clients = [self._clients[name] for name in self._in_turns]
        await self._all(client.sleep(timeout_s=timeout_s) for client in clients)

    async def wake(self, *, timeout_s: float) -> None:
        """Give these engines their memory back; groups go on with the next weights.

        Raises:
            ServiceError: If a rollout does not answer.
        """
        clients = [self._clients[name] for name in self._in_turns]
        await self._all(client.wake(timeout_s=timeout_s) for client in clients)
        for name in self._in_turns - self._leaving:
            self._placement.bring_back(name)

    async def park_groups(self, group_ids: Sequence[str]) -> None:
        """Stop groups wherever they run; what they have is cached, and each is reported."""
        clients = self._clients.values()
        if not await self._all_answer(client.interrupt_groups(group_ids) for client in clients):
            await self.cancel(group_ids)

    async def cancel(self, group_ids: Sequence[str]) -> None:
        """End groups wherever they run. A rollout that does not answer is found dead elsewhere."""
        await self._all_answer(client.cancel_groups(group_ids) for client in self._clients.values())

    async def _connect(self, worker: Worker) -> None:
        channel = await self._stack.enter_async_context(
            open_channel(worker.address, "worker", run_id=worker.run_id)
        )
        self._clients[worker.worker_id] = RolloutClient(channel)
        self._workers[worker.worker_id] = worker
        self._placement.add(worker.worker_id)

    async def _all(self, calls: Iterable[Coroutine[None, None, None]]) -> None:
        with unwrapped(ServiceError):
            async with TaskGroup() as tasks:
                for call in calls:
                    tasks.create_task(call)

    async def _all_answer(self, calls: Iterable[Coroutine[None, None, None]]) -> bool:
        """Whether all of the calls are answered; one that is not ends the others."""
        try:
            await self._all(calls)
        except ServiceError as error:
            logger.warning("a rollout did not answer", extra={"why": str(error)})
            return False
        return True
