"""Restores the state of a run from the database, its workers and the transferqueue.

New runs, runs whose worker died, and runs whose controller died take the same path.

::

    the trainer has a checkpoint of another run     -> the new run begins after the checkpoint's step
    the trainer has fewer steps than the database   -> rewind: later steps and groups in flight are
                                                       generated and trained again
    a group's samples are stored                    -> the group is READY, regardless of its recorded state
    a group is with a live rollout                  -> sent to it again; the rollout ignores repetitions
    a group is with a dead rollout                  -> generated again, from stored tokens if possible
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.common.errors import FailedPreconditionError
from services.common.fields import partition_id
from services.common.host import Clock
from services.common.runspec.data import WeightedSetSpec
from services.common.runspec.rules import critic_warmup
from services.common.runspec.run import RunSpec
from services.controller.launch.launcher import Launcher
from services.controller.rules.difficulty import Difficulty
from services.controller.rules.ledger import Ledger
from services.controller.rules.prompts import Mixture, PromptOrder
from services.controller.run.connections import (
    RunConnections,
    create_partitions,
    drop_partitions,
    training_fields,
)
from services.controller.run.dispatch.dispatcher import Dispatcher
from services.controller.run.dispatch.sample_index import SampleIndex
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.observe.observers import ObserverArgs, Observers
from services.controller.run.observe.progress import Progress
from services.controller.run.observe.waits import Waits
from services.controller.run.pipeline import TrainingPipeline
from services.controller.run.publisher import Publisher
from services.controller.run.state.journal import Journal, Recovered
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.run.train.checkpoints import Checkpoint, Checkpoints, ready_checkpoints
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing
from services.controller.run.train.train_step import EarlyTraining, TrainSteps
from services.wire.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)


async def restore(
    spec: CurrentSpec,
    connections: RunConnections,
    *,
    journal: Journal,
    queue: TransferQueueClient,
    clock: Clock,
    request_queue: RequestQueue,
    lost_workers: Collection[str],
    launcher: Launcher,
) -> TrainingPipeline:
    """Restores the pipeline of a run.

    Args:
        lost_workers: Rollouts that died since the previous attempt.
        launcher: Knows how many GPUs the run may use, and which folders are lost with the trainer.

    Raises:
        FailedPreconditionError: If the trainer's checkpoints and the database are of different
            runs, or if all steps would train only the critic.
    """
    run_id = journal.run_id
    recovered = await _reconciled(spec, connections, journal=journal, queue=queue)
    ledger = Ledger.restore(
        recovered.ledger, max_attempts=spec.now.rollout.max_attempts, now=clock.monotonic()
    )
    progress = _progress(spec, recovered)
    prompt_order = _prompt_order(spec, connections, recovered, ledger=ledger)
    ledger.difficulty = prompt_order.difficulty
    scheduler = _scheduler(
        spec,
        connections,
        journal=journal,
        queue=queue,
        clock=clock,
        ledger=ledger,
        prompt_order=prompt_order,
        summary=partial(progress.summary, ledger),
    )
    evaluator = Evaluator(spec, run_id, connections, queue=queue, request_queue=request_queue)
    components = _Parts(
        spec=spec,
        connections=connections,
        journal=journal,
        clock=clock,
        recovered=recovered,
        ledger=ledger,
        progress=progress,
        scheduler=scheduler,
        evaluator=evaluator,
        gpu_time_sharing=GpuTimeSharing(spec=spec, connections=connections, evaluator=evaluator),
        waits=Waits(),
    )
    pipeline = components.pipeline(
        steps=components.steps(prompt_order.mixture, gpus=partial(launcher.gpus_for, run_id)),
        checkpoints=await _checkpoints(
            spec, recovered, journal=journal, queue=queue, clock=clock, launcher=launcher
        ),
        queue=queue,
        request_queue=request_queue,
    )
    await evaluator.restore(recovered.evaluations, num_steps=spec.num_steps)
    await scheduler.restore(lost_workers, is_queue_empty=connections.is_queue_empty)
    return pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Objects that the stages of a run's pipeline share."""

    spec: CurrentSpec
    connections: RunConnections
    journal: Journal
    clock: Clock
    recovered: Recovered
    ledger: Ledger
    progress: Progress
    scheduler: GenerationScheduler
    evaluator: Evaluator
    gpu_time_sharing: GpuTimeSharing
    waits: Waits

    def steps(self, mixture: Mixture, *, gpus: Callable[[], int | None]) -> TrainSteps:
        """Returns the stage that trains.

        Args:
            gpus: Returns the number of GPUs that the run may use; None if it is unknown.
        """
        observers = ObserverArgs(
            spec=self.spec,
            journal=self.journal,
            progress=self.progress,
            ledger=self.ledger,
            clock=self.clock,
            gpus=gpus,
        )
        return TrainSteps(
            run_id=self.journal.run_id,
            spec=self.spec,
            journal=self.journal,
            waits=self.waits,
            connections=self.connections,
            ledger=self.ledger,
            mixture=mixture,
            scheduler=self.scheduler,
            progress=self.progress,
            gpu_time_sharing=self.gpu_time_sharing,
            observers=Observers(observers),
            version_offset=self.recovered.version_offset,
        )

    def publisher(self) -> Publisher:
        """Returns the stage that publishes weights."""
        return Publisher(
            spec=self.spec,
            journal=self.journal,
            connections=self.connections,
            ledger=self.ledger,
            scheduler=self.scheduler,
            evaluator=self.evaluator,
            progress=self.progress,
            gpu_time_sharing=self.gpu_time_sharing,
            version_offset=self.recovered.version_offset,
        )

    def pipeline(
        self,
        *,
        steps: TrainSteps,
        checkpoints: Checkpoints,
        queue: TransferQueueClient,
        request_queue: RequestQueue,
    ) -> TrainingPipeline:
        """Returns the pipeline at the step where the run continues."""
        recovered = self.recovered
        return TrainingPipeline(
            spec=self.spec,
            clock=self.clock,
            journal=self.journal,
            request_queue=request_queue,
            waits=self.waits,
            connections=self.connections,
            queue=queue,
            ledger=self.ledger,
            scheduler=self.scheduler,
            evaluator=self.evaluator,
            progress=self.progress,
            steps=steps,
            early=EarlyTraining(
                trainer=self.connections.trainer,
                ledger=self.ledger,
                scheduler=self.scheduler,
                waits=self.waits,
            ),
            publisher=self.publisher(),
            gpu_time_sharing=self.gpu_time_sharing,
            checkpoints=checkpoints,
            version_offset=recovered.version_offset,
            step=recovered.step,
            begun=recovered.begun.step if recovered.begun is not None else None,
            published=recovered.published,
        )


async def _reconciled(
    spec: CurrentSpec, connections: RunConnections, *, journal: Journal, queue: TransferQueueClient
) -> Recovered:
    """Reads the state of a run, and rewinds it if the trainer has fewer steps.

    Raises:
        FailedPreconditionError: If the trainer's checkpoints and the database are of different
            runs, or if all steps would train only the critic.
    """
    for problem in critic_warmup(spec.now, num_steps=spec.num_steps):
        raise FailedPreconditionError(problem)
    recovered = await journal.load()
    if recovered.is_new and connections.trained and spec.now.trainer.checkpoint.start_from:
        recovered = await _start_from(connections.trained, spec, journal=journal)
    if connections.trained < recovered.step:
        recovered = await _rewind(
            journal.run_id, spec.now, connections, recovered, journal=journal, queue=queue
        )
    _check_same_run(connections, recovered)
    return recovered


def _progress(spec: CurrentSpec, recovered: Recovered) -> Progress:
    progress = Progress(spec.now.algorithm.max_staleness, first_step=recovered.ledger.first_step)
    progress.restore(
        recovered.run.summary,
        steps=recovered.step,
        syncs_ms=recovered.syncs_ms,
        step_metrics=recovered.step_metrics,
    )
    return progress


async def _checkpoints(
    spec: CurrentSpec,
    recovered: Recovered,
    *,
    journal: Journal,
    queue: TransferQueueClient,
    clock: Clock,
    launcher: Launcher,
) -> Checkpoints:
    checkpoints = await journal.read(ready_checkpoints)
    return Checkpoints(
        journal.run_id,
        keep=spec.now.trainer.checkpoint.keep,
        journal=journal,
        queue=queue,
        clock=clock,
        unsaved_s=_unsaved_s(recovered, checkpoints, now=clock.time()),
        saved_step=checkpoints[0].step if checkpoints else recovered.start_step,
        why_volatile=partial(launcher.why_volatile, journal.run_id),
    )


def _unsaved_s(recovered: Recovered, checkpoints: Sequence[Checkpoint], *, now: float) -> float:
    """Returns how long work is unsaved, in seconds; lost rollouts do not reset it.

    It is infinite if the clock was set back before the newest checkpoint: how much time passed is unknown.

    Args:
        now: Seconds since the epoch.
    """
    if recovered.step == (checkpoints[0].step if checkpoints else recovered.start_step):
        return 0.0
    since = checkpoints[0].create_time if checkpoints else recovered.run.start_time or now
    return now - since if now >= since else math.inf


def _prompt_order(
    spec: CurrentSpec, connections: RunConnections, recovered: Recovered, *, ledger: Ledger
) -> PromptOrder:
    sets = spec.now.data.train_sets
    weights = {
        split: set_spec.weight
        for split, set_spec in sets.items()
        if isinstance(set_spec, WeightedSetSpec) and set_spec.weight is not None
    }
    mixture, curriculum = Mixture(connections.train_rows, weights), spec.now.data.curriculum
    difficulty = None
    if curriculum is not None:
        difficulty = Difficulty(mixture.num_rows, curriculum, rates=recovered.rates)
    return PromptOrder(
        mixture,
        difficulty=difficulty,
        seed=spec.now.seed,
        shuffle=spec.now.data.shuffle,
        position=recovered.ledger.position,
        quarantined=recovered.quarantined_rows,
        returned_rows=ledger.returned,
    )


def _scheduler(
    spec: CurrentSpec,
    connections: RunConnections,
    *,
    journal: Journal,
    queue: TransferQueueClient,
    clock: Clock,
    ledger: Ledger,
    prompt_order: PromptOrder,
    summary: Callable[[], Mapping[str, Any]],
) -> GenerationScheduler:
    sample_index = SampleIndex(
        queue,
        partition_id(journal.run_id, "train"),
        group_size=spec.now.samples_per_group,
        required_fields=training_fields(spec.now),
    )
    dispatcher = Dispatcher(
        spec,
        journal.run_id,
        ledger=ledger,
        prompt_order=prompt_order,
        journal=journal,
        rollout_pool=connections.rollout_pool,
        sample_index=sample_index,
        clock=clock,
    )
    return GenerationScheduler(
        spec,
        ledger=ledger,
        prompt_order=prompt_order,
        journal=journal,
        rollout_pool=connections.rollout_pool,
        sample_index=sample_index,
        dispatcher=dispatcher,
        summary=summary,
    )


async def _start_from(step: int, spec: CurrentSpec, *, journal: Journal) -> Recovered:
    """Starts a new run after the step of the checkpoint that its trainer has loaded."""
    folder = spec.now.trainer.checkpoint.start_from
    if spec.num_steps <= step:
        raise FailedPreconditionError(
            f"trainer.checkpoint.start_from: {folder} is of step {step}, but the run ends at step "
            f"{spec.num_steps}, so nothing would be trained; raise trainer.steps or data.epochs, which "
            "include the steps of the checkpoint"
        )
    await journal.start_at(step, message=f"training starts after step {step}, from {folder}")
    logger.info("run starts from a checkpoint", extra={"run": journal.run_id, "step": step})
    return await journal.load()


async def _rewind(
    run_id: str,
    spec: RunSpec,
    connections: RunConnections,
    recovered: Recovered,
    *,
    journal: Journal,
    queue: TransferQueueClient,
) -> Recovered:
    """Rewinds the run to the trainer's step and discards all later work."""
    step = connections.trained
    await connections.rollout_pool.cancel([group.group_id for group in recovered.ledger.groups])
    await drop_partitions(queue, run_id)
    await create_partitions(queue, run_id, spec)
    message = f"the trainer lost its state after step {step}; training continues from that step"
    # Rollouts may serve the newest step's version before the run's record contains it.
    newest = max(recovered.run.weight_version, recovered.step + recovered.version_offset)
    await journal.rewind(step, version=newest + 1, message=message)
    logger.warning("run rewound", extra={"run": run_id, "step": step})
    return await journal.load()


def _check_same_run(connections: RunConnections, recovered: Recovered) -> None:
    recorded_step = recovered.step if recovered.begun is None else recovered.begun.step
    if connections.trained > recorded_step:
        raise FailedPreconditionError(
            f"the trainer loaded step {connections.trained}, but the database records only {recorded_step}: "
            "trainer.checkpoint.directory has checkpoints of another run (set "
            "trainer.checkpoint.start_from to start from one of them), or the database is an older copy"
        )
