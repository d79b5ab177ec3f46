"""Connects the parts of one run: partitions, workers, weight session."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from services.common.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
)
from services.common.fields import ROLLOUT_FIELDS, partition_id
from services.common.rpc.client import open_channel
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import worker_names
from services.common.runspec.workers import WORKERS, kinds_with_own_gpus, rows_gauge
from services.controller.membership import Membership, Worker
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.scorers import BatchScoring, CriticClient
from services.controller.run.state.requests import CurrentSpec
from services.controller.run.weights.session import WeightSession
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import TrainerClient

logger = logging.getLogger(__name__)

# A transferqueue that does not answer within this time counts as unavailable.
_DROP_S = 3.0
_PURPOSES: Final = ("train", "validation", "partial")
_RECORDS: Final = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConnections:
    """Clients and registered workers of a run whose workers have loaded."""

    attempt: int
    """Number of the attempt to which the connections belong, from 1."""
    is_queue_empty: bool
    """True if the transferqueue held no samples of the run before this attempt: earlier ones are lost."""
    trainer: TrainerClient
    trained: int
    """Newest step in the trainer's weights."""
    served: int
    """Oldest weight version that any receiver serves; -1 if a receiver has none, or without receivers."""
    rollout_pool: RolloutPool
    scoring: BatchScoring
    critic: CriticClient
    weights: WeightSession
    serving: list[Worker]
    """Workers that receive the trainer's weights; empty if the run neither samples nor scores."""
    other_workers: list[Worker]
    """Workers besides the trainer and the rollouts."""
    train_rows: Mapping[str, int]
    """Rows of each training set, by split."""
    heldout_rows: Mapping[str, int]
    """Rows of each held-out set, by split."""

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Adds loaded rollouts to a running run: they receive weights, then groups.

        Returns:
            False if the current weight transport does not reach them; nothing has changed then.

        Raises:
            FailedPreconditionError: If they loaded different data.
            ServiceError: If one does not answer, or made a different weight plan.
        """
        rollouts_here = [worker for worker in self.serving if worker.role == "rollout"]
        _agreed_rows([*rollouts_here, *rollouts], {**self.train_rows, **self.heldout_rows})
        if not rollouts_here or not await self.weights.admit(rollouts):
            return False
        await self.rollout_pool.add(rollouts)
        self.serving.extend(rollouts)
        return True

    async def remove_rollouts(self, names: Collection[str]) -> None:
        await self.weights.remove_rollouts([*names])
        self.rollout_pool.remove(names)
        self.serving[:] = [worker for worker in self.serving if worker.worker_id not in names]


def training_fields(spec: RunSpec) -> tuple[str, ...]:
    """Returns the fields that a sample needs before it may train; scoring workers add some of them."""
    scoring = [
        kind for kind in kinds_with_own_gpus(spec.topology).values() if kind.scores == "groups"
    ]
    return ROLLOUT_FIELDS + tuple(name for kind in scoring for name in kind.adds)


async def create_partitions(
    queue: TransferQueueClient, run_id: str, spec: RunSpec, *, snapshot_id: str = ""
) -> bool:
    """Creates the run's missing partitions; if the train partition is missing, first restores the snapshot.

    Returns:
        True if the train partition never held samples: the run is new, or the transferqueue lost
        them. A partition that an earlier attempt created, but did not use before it died, counts too.
    """
    train = partition_id(run_id, "train")
    revisions = {stats.partition_id: stats.revision for stats in (await queue.stats()).partitions}
    if snapshot_id and train not in revisions:
        try:
            restored = await queue.restore_snapshot(run_id, snapshot_id)
            logger.info(
                "restored samples from the snapshot", extra={"run": run_id, "samples": restored}
            )
        # The restore fails if the last controller died while it dropped the partitions and some remain,
        # if another run has filled the memory, or if the file cannot be read.
        except (
            NotFoundError,
            DataLossError,
            AlreadyExistsError,
            ResourceExhaustedError,
            InternalError,
        ) as error:
            logger.warning(
                "cannot restore samples; they are generated again",
                extra={"run": run_id, "why": error.message},
            )
            await drop_partitions(queue, run_id)
    required = {"train": training_fields(spec), "validation": ROLLOUT_FIELDS, "partial": ()}
    for purpose in _PURPOSES:
        await queue.create_partition(
            partition_id(run_id, purpose),
            required_fields=required[purpose],
            quota_bytes=spec.transferqueue.quota_bytes,
        )
    if spec.samples.is_on:
        await queue.record_samples(
            run_id,
            max_bytes=spec.samples.max_bytes,
            max_steps=spec.samples.max_steps,
            directory=spec.samples.directory or "",
        )
    return not revisions.get(train)


async def drop_partitions(queue: TransferQueueClient, run_id: str) -> None:
    for purpose in (*_PURPOSES, _RECORDS):
        await queue.drop_partition(partition_id(run_id, purpose))


async def delete_sample_records(queue: TransferQueueClient, run_id: str) -> None:
    try:
        async with asyncio.timeout(_DROP_S):
            await drop_partitions(queue, run_id)
    except (ServiceError, TimeoutError) as error:
        # An unavailable transferqueue has nothing to drop, and its error must not hide the run's
        # result.
        logger.warning(
            "cannot delete the samples of the run", extra={"run": run_id, "reason": str(error)}
        )


async def connect(
    stack: AsyncExitStack,
    run_id: str,
    current: CurrentSpec,
    membership: Membership,
    *,
    queue: TransferQueueClient,
    attempt: int,
    is_queue_empty: bool,
    present: Collection[str],
) -> RunConnections:
    """Waits until the workers have loaded, and connects to them.

    Args:
        stack: Owns the connections and closes them.
        attempt: Number of this attempt; weight groups of later attempts have higher epochs.
        is_queue_empty: True if the transferqueue lost the stored samples.
        present: Rollouts to connect to; the run does not wait for others.

    Raises:
        DeadlineExceededError: If a worker does not load in time.
    """
    spec = current.now
    names = [name for role, name in worker_names(spec) if role != "rollout"]
    names += present
    await _wait_until_loaded(names, run_id, current, membership)
    (trainer,) = membership.workers(run_id, "trainer")
    rollouts = [w for w in membership.workers(run_id, "rollout") if w.worker_id in names]
    colocated = [w for w in rollouts if spec.is_colocated(w.worker_id)]
    _check_one_host(trainer, colocated)
    optional_workers = [w for w in membership.workers(run_id) if not WORKERS[w.role].is_required]
    drains = not spec.rollout.partial_rollout
    weights = WeightSession(
        spec.weight_sync,
        run_id,
        drains=drains,
        first_epoch=attempt << 20,
        dtypes=(spec.trainer.dtype, *(["fp8"] if spec.rollout.is_quantized else ())),
    )
    stack.push_async_callback(weights.close)
    serving = [*(rollouts if spec.has_engine else ())]
    serving += [worker for worker in optional_workers if WORKERS[worker.role].receives_weights]
    await weights.open(trainer, serving)
    scoring = BatchScoring(queue, run_id)
    await scoring.open(stack, optional_workers)
    critic = CriticClient(run_id)
    await critic.open(stack, optional_workers)
    rollout_pool = RolloutPool(max_lag=max_lag(spec))
    stack.push_async_callback(rollout_pool.close)
    await rollout_pool.open(rollouts, colocated=[worker.worker_id for worker in colocated])
    client = TrainerClient(
        await stack.enter_async_context(open_channel(trainer.address, "worker", run_id=run_id))
    )
    return RunConnections(
        attempt=attempt,
        is_queue_empty=is_queue_empty,
        trainer=client,
        trained=await client.newest_step(timeout_s=spec.limits.step_timeout_s),
        served=served_version(serving),
        rollout_pool=rollout_pool,
        scoring=scoring,
        critic=critic,
        weights=weights,
        serving=serving,
        other_workers=optional_workers,
        train_rows=_agreed_rows(rollouts, spec.data.train_sets),
        heldout_rows=_agreed_rows(rollouts, spec.data.heldout_sets),
    )


async def _wait_until_loaded(
    names: Collection[str], run_id: str, current: CurrentSpec, membership: Membership
) -> None:
    spec = current.now

    def missing() -> list[str]:
        workers = {worker.worker_id: worker for worker in membership.workers(run_id)}
        causes = {
            name: f" ({worker.activity})" for name, worker in workers.items() if worker.is_cut_off
        }
        return [
            name + causes.get(name, "")
            for name in names
            if name not in workers or not is_loaded(workers[name], spec)
        ]

    await membership.wait_until(
        lambda: not missing(),
        timeout_s=lambda: current.now.limits.start_timeout_s,
        waiting_for=lambda: (
            f"{', '.join(missing())} to load; see the workers' logs, "
            "or raise limits.start_timeout_s"
        ),
    )


def max_lag(spec: RunSpec) -> int:
    """Returns the versions by which a rollout that receives groups may be behind.

    The gate opens by its version, and must let the trainer reach the next version that is published.
    """
    sync, max_staleness = spec.weight_sync, spec.algorithm.max_staleness
    if not sync.is_stored:
        return 0
    return max(0, min(max_staleness // 2, max_staleness + 1 - sync.publish_every))


def is_loaded(worker: Worker, spec: RunSpec) -> bool:
    """Returns True if a worker has loaded what it needs and reaches the transferqueue.

    A worker needs its model; a rollout also needs its data.
    """
    gauges = WORKERS[worker.role].gauges(spec)
    return (
        not worker.is_cut_off
        and worker.state in ("loaded", "ready")
        and worker.gauges.keys() >= {*gauges}
    )


def _check_one_host(trainer: Worker, colocated: Sequence[Worker]) -> None:
    """Raises FailedPreconditionError if a colocated worker, which a user may start, is on another host."""
    if apart := [worker.worker_id for worker in colocated if worker.host_id != trainer.host_id]:
        raise FailedPreconditionError(
            f"{', '.join(apart)} must be on the host of {trainer.worker_id} to share its GPUs, but run on "
            "another one; start them there, or set topology.placement to 'disaggregated'"
        )


def served_version(workers: Iterable[Worker]) -> int:
    """Returns the weight version that all workers serve; -1 if one is not ready, or they differ."""
    versions = {worker.weight_version if worker.state == "ready" else -1 for worker in workers}
    return versions.pop() if len(versions) == 1 else -1


def _agreed_rows(rollouts: Sequence[Worker], splits: Iterable[str]) -> dict[str, int]:
    agreed: dict[str, int] = {}
    for split in splits:
        gauge = rows_gauge(split)
        counts = {worker.worker_id: int(worker.gauges[gauge]) for worker in rollouts}
        if len(set(counts.values())) != 1:
            raise FailedPreconditionError(
                f"all rollouts must load the same data, but {gauge} is {counts}; give them the same files"
            )
        agreed[split] = counts[rollouts[0].worker_id]
    return agreed
