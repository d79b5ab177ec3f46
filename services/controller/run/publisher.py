"""Publishes the trainer's newest weights to the rollouts while training continues.

::

    a step is trained      -> its version is offered; it is copied before the next step if no transfer
                              is running
    a version is served    -> the gate opens, an evaluation may start, the newest offered version is next
    a rollout has joined   -> it receives the served version from the trainer's copy, or a newer one
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.common.errors import UnavailableError
from services.controller.membership import Worker
from services.controller.rules.ledger import Ledger
from services.controller.run.connections import RunConnections
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.observe.progress import Progress, sync_facts
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing
from services.controller.store.records import Note


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Publishes weight versions one after the other, always the newest one."""

    spec: CurrentSpec
    journal: Journal
    connections: RunConnections
    ledger: Ledger
    scheduler: GenerationScheduler
    evaluator: Evaluator
    progress: Progress
    gpu_time_sharing: GpuTimeSharing
    version_offset: int
    """Weight version of a step minus the step."""
    _newest: int = field(default=-1, init=False)
    _served: int = field(default=-1, init=False)
    _joining: set[str] = field(default_factory=set, init=False)
    _late: frozenset[str] = field(default=frozenset(), init=False)
    """Rollouts that still load the served version from a store; it needs no other publication for them."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @property
    def is_busy(self) -> bool:
        """True if a version is pending or being sent."""
        is_kept = self.connections.weights.has_copy(self._served + self.version_offset)
        # Colocated runs publish each step; a transfer to joining rollouts alone would need another
        # GPU switch.
        is_awaited = bool(self._joining - self._late) or self.connections.weights.is_lacking
        has_to_send = is_awaited and is_kept and not self.gpu_time_sharing.is_needed
        return self._served < self._newest or has_to_send

    async def record_served(self, step: int) -> None:
        """Records that every rollout already serves the weights of ``step``; opens the gate."""
        self._newest = self._served = step
        await self._open_gate(step)
        async with self._changed:
            self._changed.notify_all()

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Adds loaded rollouts to a running run; see :meth:`RunConnections.admit`."""
        if not await self.connections.admit(rollouts):
            return False
        names, weights = [worker.worker_id for worker in rollouts], self.connections.weights
        if updated := await weights.send_from_peers(names):
            for worker in rollouts:
                if worker.worker_id in updated:
                    worker.weight_version = weights.version
            self.connections.rollout_pool.readmit_current()
            self.scheduler.published(self._open_step(self._served))  # more slots are available
        async with self._changed:
            self._joining.update(set(names) - set(updated))
            self._changed.notify_all()
        return True

    async def forget(self, names: Collection[str]) -> None:
        """Stops waiting for rollouts that left before they served a version."""
        async with self._changed:
            self._joining.difference_update(names)
            self._changed.notify_all()

    async def wait_all_serve(self) -> None:
        """Waits until all admitted rollouts have weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._joining)

    async def offer(self, step: int) -> None:
        """Records that the trainer has the weights of ``step``."""
        async with self._changed:
            self._newest = max(self._newest, step)
            self._changed.notify_all()
        # Yields to the event loop, so that an idle publisher can start before the next step.
        await asyncio.sleep(0)

    async def wait_served(self, step: int) -> None:
        """Waits until the weights of ``step``, or newer ones, are in service."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._served >= step)

    async def wait_idle(self) -> None:
        """Waits until no version is to be sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_busy)

    async def run(self) -> None:
        """Publishes versions until it is cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_busy)
            await self._publish()

    async def follow(self) -> None:
        """Lets rollouts load weights from a store at their own pace, until it is cancelled."""
        await self.connections.weights.follow(self._admit_late)

    async def _admit_late(self) -> None:
        """Lets rollouts that have caught up receive groups; publishes again if one lacks a copy."""
        weights, rollout_pool = self.connections.weights, self.connections.rollout_pool
        names = weights.served_by(weights.version)
        for worker in self.connections.serving:
            if worker.worker_id in names:
                worker.weight_version = weights.version
        rollout_pool.readmit_current()
        self.scheduler.published(self._open_step(self._served))
        async with self._changed:
            self._joining.difference_update(names)
            self._changed.notify_all()

    def _open_step(self, step: int) -> int:
        """Returns the step up to which the gate opens: that of the oldest weights that receive groups.

        Tokens of a rollout that loads weights at its own pace are then within the staleness bound.
        """
        oldest = self.connections.rollout_pool.oldest_version()
        return min(step, oldest - self.version_offset) if oldest >= 0 else step

    async def _publish(self) -> None:
        report = await self.gpu_time_sharing.publish(self._version_to_send)
        if report.lost:
            raise UnavailableError(f"{', '.join(report.lost)} did not receive weights")
        version, rollout_pool = report.version, self.connections.rollout_pool
        missed_workers: list[str] = []
        for worker in self.connections.serving:
            if worker.worker_id in report.receivers:
                worker.weight_version = version
            else:
                missed_workers.append(worker.worker_id)
        rollout_pool.exclude_missed(missed_workers)
        rollout_pool.readmit_current()
        self.progress.record_sync(report)
        message = f"weight version {version} is served by every rollout"
        if report.late:
            message = (
                f"weight version {version} is served by {', '.join(report.receivers)}; "
                f"{', '.join(report.late)} still load it"
            )
        if not self.connections.serving:
            message = f"weight version {version} has no receivers: the run samples nothing"
        summary, step = self.progress.summary(self.ledger), version - self.version_offset
        data = {**sync_facts(report), "step": step}
        note = Note("WeightsPublished", message, data, None, version, summary)
        await self.journal.record_event(note, self.ledger)
        if step > self._served:
            await self._open_gate(step)
        else:
            self.scheduler.published(self._open_step(step))  # more slots are available
        async with self._changed:
            self._served = step
            self._late = frozenset(report.late)
            self._joining.difference_update(report.receivers)
            self._changed.notify_all()

    def _version_to_send(self) -> int:
        """Returns the newest offered version if the trainer has its copy, else that of the trainer's weights.

        The trainer may have trained a step since the offer.
        """
        offered = self._newest + self.version_offset
        if self.connections.weights.has_copy(offered):
            return offered
        return self.progress.num_steps + self.version_offset

    async def _open_gate(self, step: int) -> None:
        self.scheduler.published(self._open_step(step))
        await self.evaluator.published(
            step + self.version_offset, step=step, is_last=step == self.spec.num_steps
        )
