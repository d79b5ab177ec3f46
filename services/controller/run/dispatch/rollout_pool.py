"""Rollouts of one run: connections to them, their load, and which may receive groups."""

import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from statistics import fmean

from services.common.errors import ServiceError, UnavailableError
from services.common.rpc.client import open_channel
from services.common.task_group import TaskGroup, unwrapped
from services.controller.membership import Worker
from services.controller.rules.learning import DECODE_TIMES
from services.controller.rules.placement import Placement
from services.wire.workers import GroupAssignment, RolloutClient

logger = logging.getLogger(__name__)
# Reasons for which the placement excludes rollouts, besides those that this class tracks by name.
_CUT_OFF = "cut off"
_ASLEEP = "asleep"


class RolloutPool:
    """Connected rollouts of a run, from which the dispatcher chooses.

    Args:
        max_lag: Versions by which a rollout that receives groups may lag the newest one; more than 0
            only for rollouts that load weights at their own pace.
    """

    def __init__(self, *, max_lag: int = 0) -> None:
        self._max_lag = max_lag
        self._stack = AsyncExitStack()
        self._clients: dict[str, RolloutClient] = {}
        self._workers: dict[str, Worker] = {}
        self._placement = Placement()
        self._colocated: frozenset[str] = frozenset()
        self._reserved: set[str] = set()
        self._outdated: set[str] = set()
        self._leaving: set[str] = set()
        self._cut_off: set[str] = set()
        self._progress: dict[str, tuple[float, float]] = {}
        self._newest_version = -1
        self._least_version = 0

    async def open(self, workers: Iterable[Worker], *, colocated: Iterable[str] = ()) -> None:
        """Connects to the rollouts.

        Args:
            colocated: Names of those that share GPUs with the trainer.
        """
        self._colocated = frozenset(colocated)
        for worker in workers:
            await self._connect(worker)

    async def add(self, workers: Iterable[Worker]) -> None:
        """Connects to further rollouts, which receive groups once they serve the current weights."""
        for worker in workers:
            await self._connect(worker)
            self._outdated.add(worker.worker_id)
            self._placement.exclude(worker.worker_id)

    def detach(self, names: Iterable[str]) -> None:
        """Stops assigning work to rollouts that are about to leave."""
        for name in names:
            self._leaving.add(name)
            self._placement.exclude(name)

    def detach_ending(self) -> None:
        """Stops assigning work to draining rollouts, which would refuse it."""
        ending = [name for name, worker in self._workers.items() if worker.state == "draining"]
        self.detach(name for name in ending if name not in self._leaving)

    def update_cut_off(self) -> tuple[dict[str, str], list[str]]:
        """Stops assigning work to rollouts that cannot reach the transferqueue, until they can again.

        Returns:
            The causes by rollout that is cut off since the last call, and the rollouts that are no longer
            cut off.
        """
        now = {name for name, worker in self._workers.items() if worker.is_cut_off}
        newly_cut_off, back = sorted(now - self._cut_off), sorted(self._cut_off - now)
        self._cut_off = now
        for name in newly_cut_off:
            self._placement.exclude(name, _CUT_OFF)
        for name in back:
            self._placement.include(name, _CUT_OFF)
        return {name: self._workers[name].activity for name in newly_cut_off}, back

    @property
    def cut_off(self) -> frozenset[str]:
        """Rollouts that cannot reach the transferqueue, as of the last :meth:`update_cut_off`."""
        return frozenset(self._cut_off)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            for entries in (self._clients, self._workers, self._progress):
                entries.pop(name, None)
            self._outdated.discard(name)
            self._leaving.discard(name)
            self._cut_off.discard(name)
            self._placement.remove(name)

    async def close(self) -> None:
        await self._stack.aclose()

    def has_weights(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.weight_version >= 0

    def newest_version(self) -> int:
        """Returns the newest weight version that any rollout has served; -1 before the first.

        It never decreases: a heartbeat from before a publication may arrive after it, with the older
        version.
        """
        versions = (worker.weight_version for worker in self._workers.values())
        self._newest_version = max(self._newest_version, *versions, -1)
        return self._newest_version

    @property
    def num_replicas(self) -> int:
        """Number of rollouts that may receive training groups."""
        return self._placement.num_present

    def present(self) -> list[str]:
        """Returns the rollouts that serve the newest weights and may receive any work.

        Rollouts that are cut off from the transferqueue are included only if all are cut off.
        """
        excluded = self._reserved | self._outdated | self._leaving
        names = [name for name in self._clients if name not in excluded]
        return [name for name in names if name not in self._cut_off] or names

    def has_reserved(self, names: Iterable[str]) -> bool:
        """Returns True if an evaluation holds any of the rollouts."""
        return not self._reserved.isdisjoint(names)

    def reserve(self, count: int) -> list[str]:
        """Reserves up to ``count`` rollouts for an evaluation; training keeps at least one.

        Colocated rollouts are never reserved: they sleep in the trainer's turn, which discards their
        weights, and a reserved rollout receives no others.

        Returns:
            Names of the reserved rollouts; empty if only colocated rollouts, or a single one, are present.
        """
        present = self.present()
        awake = [name for name in present if name not in self._colocated]
        reserved = awake[: max(0, min(count, len(present) - 1))]
        for name in reserved:
            self._placement.exclude(name)
        self._reserved.update(reserved)
        return reserved

    def unreserve(self, names: Sequence[str]) -> None:
        """Returns reserved rollouts to training once they serve the current weights."""
        self._reserved.difference_update(names)
        self._outdated.update(names)
        self.readmit_current()

    def exclude_missed(self, names: Iterable[str]) -> None:
        """Stops assigning work to rollouts that a publication left out, until they serve the newest weights.

        The evaluation of such a rollout ended while the publication ran, so that its weights were the
        newest then. Groups that it would start now could exceed the staleness bound.
        """
        for name in self._clients.keys() & {*names} - self._reserved:
            self._outdated.add(name)
            if not self._may_generate(self._workers[name]):
                self._placement.exclude(name)

    def readmit_current(self) -> None:
        """Resumes training work on rollouts that now serve the newest weights, or recent ones."""
        newest = self.newest_version()
        for name in [*self._outdated]:
            version = self._workers[name].weight_version
            if version == newest:
                self._outdated.discard(name)
            if self._may_generate(self._workers[name]) and name not in self._leaving:
                self._placement.include(name)

    def oldest_version(self) -> int:
        """Returns the oldest weight version of the rollouts that may receive groups.

        That is the newest one, except for rollouts that load weights at their own pace. One that was left
        behind counts as soon as its weights are recent, and receives groups once they are as new as those
        by which the gate was opened before.
        """
        newest = self.newest_version()
        versions = (worker.weight_version for worker in self._workers.values())
        oldest = min((v for v in versions if max(0, newest - self._max_lag) <= v), default=newest)
        self._least_version = max(self._least_version, oldest)
        return oldest

    def _may_generate(self, worker: Worker) -> bool:
        """Returns True if a rollout's weights are new enough for groups, as far as the gate is open."""
        newest = self.newest_version()
        least = max(newest - self._max_lag, self._least_version)
        # Rollouts of a run that sends no weights have none, and are all equal.
        return worker.weight_version == newest or worker.weight_version >= least

    def idle_seconds(self) -> dict[str, float]:
        return {
            name: worker.gauges.get("idle_seconds", 0.0) for name, worker in self._workers.items()
        }

    def tokens_total(self) -> float:
        return sum(worker.gauges.get("tokens_total", 0.0) for worker in self._workers.values())

    def decode_times(self) -> dict[str, float]:
        """Returns decode step times averaged over the rollouts; empty before any has decoded."""
        reports = [worker.gauges for worker in self._workers.values()]
        reports = [gauges for gauges in reports if gauges.keys() >= set(DECODE_TIMES)]
        return {name: fmean(gauges[name] for gauges in reports) for name in DECODE_TIMES if reports}

    def acceptance_length(self) -> dict[str, float]:
        """Returns the mean tokens per pass with proposals, over the rollouts; empty without speculation."""
        gauge = "acceptance_length"
        lengths = [w.gauges[gauge] for w in self._workers.values() if gauge in w.gauges]
        return {gauge: fmean(lengths)} if lengths else {}

    def moved_at(self, worker_id: str, *, now: float) -> float:
        """Returns when a rollout's token count was last seen to change, in monotonic seconds."""
        worker = self._workers.get(worker_id)
        tokens = worker.gauges.get("tokens_total", 0.0) if worker is not None else 0.0
        last_tokens, since = self._progress.get(worker_id, (-1.0, now))
        since = since if tokens == last_tokens else now
        self._progress[worker_id] = (tokens, since)
        return since

    def choose(self, holder: str, *, room: int) -> tuple[str, int]:
        """Returns the rollout for a group, and the weight version that it serves.

        Args:
            holder: Rollout that had the group before; empty without one.
            room: Groups for which one rollout has slots.

        Raises:
            UnavailableError: If no rollout may receive groups.
        """
        worker_id = self._placement.choose(holder, room=room)
        if worker_id is None:
            raise UnavailableError("no rollout is available, so no group can start")
        return worker_id, self._workers[worker_id].weight_version

    def choose_several(self, count: int) -> tuple[list[str], int]:
        """Returns up to ``count`` rollouts for the shards of a group, and the oldest version they serve.

        Raises:
            UnavailableError: If no rollout may receive groups.
        """
        names = self._placement.least_loaded(count)
        if not names:
            raise UnavailableError("no rollout is available, so no group can start")
        return names, min(self._workers[name].weight_version for name in names)

    def assigned(self, worker_id: str) -> None:
        """Records that a group was assigned to a rollout."""
        self._placement.assigned(worker_id)

    def finished(self, worker_id: str) -> None:
        """Records that a group of a rollout ended."""
        self._placement.finished(worker_id)

    async def start(self, by_worker: dict[str, list[GroupAssignment]]) -> None:
        """Sends assigned groups to their rollouts; errors of leaving rollouts are ignored."""
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
        """Parks the groups of some rollouts, or of all; rollouts cache the tokens and report each group."""
        clients = [self._clients[name] for name in (self._clients if names is None else names)]
        await self._all_answer(client.interrupt_groups() for client in clients)

    async def park_for_others(self) -> None:
        """Parks groups of rollouts that are about to sleep, so that other rollouts continue them.

        If all rollouts sleep, the groups stay where they are.
        """
        if not self._colocated.issuperset(self.present()):
            for name in self._colocated:
                self._placement.exclude(name, _ASLEEP)
            await self.interrupt([*self._colocated])

    async def sleep(self, *, timeout_s: float) -> None:
        """Releases the GPU memory of colocated engines; their groups wait in place.

        Raises:
            ServiceError: If a rollout does not answer.
        """
        clients = [self._clients[name] for name in self._colocated]
        await self._all(client.sleep(timeout_s=timeout_s) for client in clients)

    async def wake(self, *, timeout_s: float) -> None:
        """Restores the GPU memory of colocated engines; their groups continue with the next weights.

        Rollouts that receive no groups for another reason still receive none.

        Raises:
            ServiceError: If a rollout does not answer.
        """
        clients = [self._clients[name] for name in self._colocated]
        await self._all(client.wake(timeout_s=timeout_s) for client in clients)
        for name in self._colocated:
            self._placement.include(name, _ASLEEP)

    async def park_groups(self, group_ids: Sequence[str]) -> None:
        """Parks groups on all rollouts, which cache the tokens and report each group.

        If a rollout does not answer, the groups are cancelled.
        """
        clients = self._clients.values()
        if not await self._all_answer(client.interrupt_groups(group_ids) for client in clients):
            await self.cancel(group_ids)

    async def cancel(self, group_ids: Sequence[str]) -> None:
        """Cancels groups on all rollouts; health checks elsewhere detect a rollout that does not answer."""
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
        """Returns False if a call fails, which cancels the other calls."""
        try:
            await self._all(calls)
        except ServiceError as error:
            logger.warning("rollout does not answer", extra={"why": str(error)})
            return False
        return True
