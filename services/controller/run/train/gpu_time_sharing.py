"""Whose turn it is on GPUs that trainer and rollouts share (``topology.placement: colocated`` or ``mixed``).

::

    rollouts' shift   they generate, and evaluate, until a batch is complete
    handed over       evaluations end; engines sleep, running responses keep their tokens; the trainer wakes
    trainer's shift   it trains the batch, and copies its weights for the rollouts
    handed over       the trainer sleeps, engines wake; they adopt the copy, and responses go on

Who sleeps has its state in host memory, or none that is needed again. Rollouts with GPUs of their own never
sleep: they take over what is unfinished at the handover, and put the trainer's copy into service between two
of their tokens. Where each has GPUs of its own, all of this does nothing.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common.rpc.client import open_channel
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import Launcher, gpu_hosts
from services.controller.membership.registry import Membership, Worker
from services.controller.run.connections import RunConnections
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.state.requests import CurrentSpec, with_replicas
from services.controller.run.weights.session import SyncReport
from services.rollout.client import RolloutClient
from services.trainer.client import TrainerClient


@dataclass(slots=True, kw_only=True)
class GpuTimeSharing:
    """Of one run. At first both sides sleep, or work; the first handover settles it."""

    spec: CurrentSpec
    connections: RunConnections
    evaluator: Evaluator
    _is_trainers: bool = field(default=False, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _handover: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def are_needed(self) -> bool:
        """Whether GPUs are shared."""
        return self.spec.now.topology.is_colocated

    async def begin_training(self) -> None:
        """Return when the trainer has the GPUs; weights stay pinned until others are published.

        Raises:
            ServiceError: If a worker does not answer in ``limits.step_timeout_s``.
        """
        if not self.are_needed:
            return
        async with self._handover:
            if self._is_trainers:
                return
            await self.evaluator.leased()
            # An evaluation that holds it is brought to its end under the weights that it is of.
            await self.connections.weights.pin.acquire()
            self._is_trainers = True
            timeout_s = self.spec.now.limits.step_timeout_s
            with self._timed("rollouts_sleep_s"):
                if self.spec.now.rollout.partial_rollout:
                    await self.connections.replicas.park_for_others()
                await self.connections.replicas.sleep(timeout_s=timeout_s)
            with self._timed("trainer_wake_s"):
                await self.connections.trainer.wake(timeout_s=timeout_s)

    async def publish(self, newest: Callable[[], int]) -> SyncReport:
        """Bring the trainer's newest weights into service; rollouts have the GPUs from their copy on.

        Raises:
            ServiceError: As :meth:`WeightSession.publish` does, or if a worker does not answer.
        """
        weights = self.connections.weights
        if not self.are_needed:
            # A version that is about to be evaluated stays until the evaluation has its rollouts.
            await self.evaluator.leased()
            return await weights.publish(newest)
        await self.begin_training()
        try:
            return await weights.replace(newest, on_copied=self._end_training)
        finally:
            weights.pin.release()

    async def _end_training(self) -> None:
        if not self._is_trainers:
            return
        timeout_s = self.spec.now.limits.step_timeout_s
        with self._timed("trainer_sleep_s"):
            await self.connections.trainer.sleep(timeout_s=timeout_s)
        with self._timed("rollouts_wake_s"):
            await self.connections.replicas.wake(timeout_s=timeout_s)
        self._is_trainers = False

    def take_seconds(self) -> dict[str, float]:
        """Seconds of handovers since they were taken, by what was done, and of all."""
        spent, self._seconds = self._seconds, {}
        return {**spent, "handover_s": sum(spent.values())} if spent else {}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin


async def start_colocated(
    run_id: str,
    current: CurrentSpec,
    *,
    launcher: Launcher,
    membership: Membership,
    num_rollouts: int,
) -> None:
    """Start those workers of a run that do not run, each while nobody else has the GPUs.

    Raises:
        DeadlineExceededError: If the trainer does not come in time, or a worker does not fall asleep.
    """
    spec = with_replicas(current.now, num_rollouts)
    timeout_s = spec.limits.step_timeout_s

    def loaded(role: str) -> list[Worker]:
        workers = membership.workers(run_id)
        return [w for w in workers if w.role == role and w.state in ("loaded", "ready")]

    async with TaskGroup() as tasks:
        for worker in loaded("rollout"):
            if spec.is_colocated(worker.worker_id):
                tasks.create_task(_put_to_sleep(worker, timeout_s=timeout_s))
    await launcher.start(run_id, spec, later=gpu_hosts(spec))
    await membership.wait_until(
        lambda: bool(loaded("trainer")),
        timeout_s=lambda: current.now.limits.start_timeout_s,
        waiting_for=lambda: "trainer-0 to load; see its log",
    )
    await _put_to_sleep(*loaded("trainer"), timeout_s=timeout_s)
    await launcher.start(run_id, spec)


async def _put_to_sleep(worker: Worker, *, timeout_s: float) -> None:
    kind = TrainerClient if worker.role == "trainer" else RolloutClient
    async with open_channel(worker.address, "worker", run_id=worker.run_id) as channel:
        await kind(channel).sleep(timeout_s=timeout_s)
