"""Publishes what the trainer makes beside training: always the newest version, one after the other.

a step is trained    -> its version is offered, and copied before the next step if none is on its way
a version is served  -> the gate opens, an evaluation may begin, and what was offered since is next
a rollout has joined -> what is served is sent again, from the trainer's copy, or what is newer
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import UnavailableError
from services.controller.membership.registry import Worker
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
    """Brings the newest step's weights into service."""

    spec: CurrentSpec
    journal: Journal
    connections: RunConnections
    ledger: Ledger
    scheduler: GenerationScheduler
    evaluator: Evaluator
    progress: Progress
    gpu_time_sharing: GpuTimeSharing
    version_offset: int
    """What weight versions are above their steps."""
    _newest: int = field(default=-1, init=False)
    _served: int = field(default=-1, init=False)
    _joining: set[str] = field(default_factory=set, init=False)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether a version is on its way."""
        is_kept = self.connections.weights.has_copy(self._served + self.version_offset)
        # In turns each step is published; for who joins alone the others would have to hand over GPUs.
        has_to_send = bool(self._joining) and is_kept and not self.gpu_time_sharing.are_needed
        return self._served < self._newest or has_to_send

    async def already(self, step: int) -> None:
        """Every rollout serves the weights of a step since before: generate and evaluate under them."""
        self._newest = self._served = step
        await self._open_gate(step)
        async with self._changed:
            self._changed.notify_all()

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Have rollouts take part that have loaded meanwhile; see :meth:`RunConnections.admit`."""
        if not await self.connections.admit(rollouts):
            return False
        names, weights = [worker.worker_id for worker in rollouts], self.connections.weights
        if brought := await weights.bring(names):
            for worker in rollouts:
                if worker.worker_id in brought:
                    worker.weight_version = weights.version
            self.connections.replicas.bring_back()
            self.scheduler.published(self._served)  # there are more places
        async with self._changed:
            self._joining.update(set(names) - set(brought))
            self._changed.notify_all()
        return True

    async def all_serve(self) -> None:
        """Return once all that were admitted have weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._joining)

    async def offer(self, step: int) -> None:
        """The trainer has the weights of ``step``."""
        async with self._changed:
            self._newest = max(self._newest, step)
            self._changed.notify_all()
        # If nothing is on its way, whoever publishes has its turn before the next step.
        await asyncio.sleep(0)

    async def served(self, step: int) -> None:
        """Return once the weights of ``step``, or of a later one, are in service."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._served >= step)

    async def settled(self) -> None:
        """Return once nothing is on its way."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_busy)

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_busy)
            await self._publish()

    async def _publish(self) -> None:
        report = await self.gpu_time_sharing.publish(lambda: self._newest + self.version_offset)
        if report.lost:
            raise UnavailableError(f"{', '.join(report.lost)} did not take part in weight sync")
        version, replicas = report.version, self.connections.replicas
        for worker in self.connections.serving:
            if worker.worker_id in report.receivers:
                worker.weight_version = version
        replicas.bring_back()
        self.progress.synced(report)
        message = f"weight version {version} is served by every rollout"
        if not self.connections.serving:
            message = f"weight version {version} is sent to nobody: the run samples nothing"
        summary = self.progress.summary(self.ledger)
        note = Note("WeightsPublished", message, sync_facts(report), None, version, summary)
        await self.journal.note(note, self.ledger)
        step = version - self.version_offset
        if step > self._served:
            await self._open_gate(step)
        else:
            self.scheduler.published(step)  # there are more places
        async with self._changed:
            self._served = step
            self._joining.difference_update(report.receivers)
            self._changed.notify_all()

    async def _open_gate(self, step: int) -> None:
        self.scheduler.published(step)
        await self.evaluator.published(
            step + self.version_offset, step=step, is_last=step == self.spec.num_steps
        )
