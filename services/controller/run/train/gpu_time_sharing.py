"""Switches shared GPUs between trainer and rollouts (``topology.placement``: colocated or mixed).

::

    rollouts' turn   rollouts generate, and evaluate, until a batch is complete
    switch           evaluations end; engines sleep, running responses keep their tokens; the trainer
                     wakes
    trainer's turn   the trainer trains the batch, and copies its weights for the rollouts
    switch           the trainer sleeps, engines wake; they adopt the copy, and responses continue

A sleeping side keeps its state in host memory, if it needs the state again. Rollouts with their own
GPUs never sleep: they take over unfinished groups at the switch, and adopt the trainer's copy
between two tokens. In disaggregated runs this module does nothing.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common.rpc.client import open_channel
from services.common.runspec.worker_kinds import gpu_hosts
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import Launcher
from services.controller.membership import Membership, Worker
from services.controller.run.connections import RunConnections
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.state.requests import CurrentSpec, with_replicas
from services.controller.run.weights.session import SyncReport
from services.wire.workers import RolloutClient, TrainerClient


@dataclass(slots=True, kw_only=True)
class GpuTimeSharing:
    """Decides which side has the shared GPUs of a run.

    At first both sides sleep, or both are awake; after the first switch, one side sleeps.
    """

    spec: CurrentSpec
    connections: RunConnections
    evaluator: Evaluator
    _trainer_has_gpus: bool = field(default=False, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _switch_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def is_needed(self) -> bool:
        """True if trainer and rollouts share GPUs."""
        return self.spec.now.topology.is_colocated

    async def begin_training(self) -> None:
        """Gives the GPUs to the trainer; weights stay pinned until the next publication.

        Raises:
            ServiceError: If a worker does not answer within ``limits.step_timeout_s``.
        """
        if not self.is_needed:
            return
        async with self._switch_lock:
            if self._trainer_has_gpus:
                return
            await self.evaluator.wait_leased()
            # Waits for an evaluation that holds the pin, which finishes under its weight version.
            await self.connections.weights.pin.acquire()
            self._trainer_has_gpus = True
            timeout_s = self.spec.now.limits.step_timeout_s
            with self._timed("rollouts_sleep_s"):
                if self.spec.now.rollout.partial_rollout:
                    await self.connections.rollout_pool.park_for_others()
                await self.connections.rollout_pool.sleep(timeout_s=timeout_s)
            with self._timed("trainer_wake_s"):
                await self.connections.trainer.wake(timeout_s=timeout_s)

    async def publish(self, newest: Callable[[], int]) -> SyncReport:
        """Publishes the trainer's newest weights; rollouts get the GPUs once the weights are copied.

        Raises:
            ServiceError: As :meth:`WeightSession.publish` does, or if a worker does not answer.
        """
        weights = self.connections.weights
        if not self.is_needed:
            # A version that is due for evaluation stays until the evaluation has reserved its
            # rollouts.
            await self.evaluator.wait_leased()
            return await weights.publish(newest)
        await self.begin_training()
        try:
            return await weights.replace(newest, on_copied=self._end_training)
        finally:
            weights.pin.release()

    async def _end_training(self) -> None:
        if not self._trainer_has_gpus:
            return
        timeout_s = self.spec.now.limits.step_timeout_s
        with self._timed("trainer_sleep_s"):
            await self.connections.trainer.sleep(timeout_s=timeout_s)
        with self._timed("rollouts_wake_s"):
            await self.connections.rollout_pool.wake(timeout_s=timeout_s)
        self._trainer_has_gpus = False

    def take_seconds(self) -> dict[str, float]:
        """Returns and resets the seconds spent on switches, by phase and in total."""
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "gpu_switch_s": sum(seconds.values())} if seconds else {}

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
    """Starts the missing workers of a run; each loads while all others leave the GPUs free.

    Raises:
        DeadlineExceededError: If the trainer does not load in time, or a worker does not fall
            asleep.
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
        waiting_for=lambda: "trainer-0 to load; see its log, or raise limits.start_timeout_s",
    )
    await _put_to_sleep(*loaded("trainer"), timeout_s=timeout_s)
    await launcher.start(run_id, spec)


async def _put_to_sleep(worker: Worker, *, timeout_s: float) -> None:
    kind = TrainerClient if worker.role == "trainer" else RolloutClient
    async with open_channel(worker.address, "worker", run_id=worker.run_id) as channel:
        await kind(channel).sleep(timeout_s=timeout_s)
