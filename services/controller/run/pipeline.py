"""Runs the concurrent loops that train one run, and owns the state they share.

Each box is a method: a bare name is a method of :class:`TrainingPipeline`, a dotted one is a method
of that attribute. ``lifecycle.loop.train`` calls ``catch_up``, then the methods of the first loop,
one step after the other, and at last ``finish``; all other loops run concurrently as tasks.

::

                     groups               samples               groups are READY
    scheduler      ---------> rollouts  ----------> scheduler  ------------------> take_batch
    .dispatch_loop           (engines)              .collect                           |
        ^                     ^  ^   |                                                 | a batch
        | scheduler           |  |   | held-out samples                                v
        | .published          |  |   +-------------> evaluator                       train
        | (the gate opens)    |  |                   .collect                          |
        |                     |  | held-out groups       | samples                     | offer,
        |                     |  |                       v                             | publish
        |                     |  +------------------ evaluator                         |
        |                     |                      .run                              |
        |                     | weights                  ^ evaluator.published         |
        |                     |                          |                             v
        +---------------------+--------------------------+---------------------- publisher.run

::

    take_batch, train, settle                  trains one step after the other
        waits for     take_batch: enough READY groups for a batch; train: the trainer's turn on
                      shared GPUs, and weights that are not being copied; settle: served weights
        unblocked by  scheduler.collect, scheduler.fail (groups finish or end), publisher.run
                      (weights are copied, served); a pause request ends the wait for a batch

    scheduler.dispatch_loop                    starts prompt groups on rollouts
        waits for     room under the staleness gate and free slots, or the time of the next check
                      for stalled groups
        unblocked by  scheduler.published (weights are served), scheduler.collect, scheduler.fail,
                      scheduler.replace_lost (groups end), train (a batch is released)

    scheduler.collect                          moves groups to READY
        waits for     samples in the ``train`` partition of the transferqueue
        unblocked by  rollouts, which store samples

    scheduler.replace_lost                     restarts groups whose samples were lost
        waits for     the loss of a shard of the transferqueue
        unblocked by  the transferqueue, which reports the lost keys

    scheduler.follow_cut_off                   moves groups away from rollouts that cannot store samples
        waits for     rollouts that report that they cannot reach the transferqueue, or can again
        unblocked by  heartbeats, which it reads each second

    _report_cut_off                            reports scoring workers and critics that cannot fetch samples
        waits for     reports of these workers that they cannot reach the transferqueue, or can again
        unblocked by  heartbeats, which it reads each second

    early.accumulate                           trains READY groups before their batch is full
        waits for     READY groups that it has not sent yet (``trainer.accumulate_early``)
        unblocked by  scheduler.collect, scheduler.fail; take_batch starts and cancels it

    publisher.run                              brings the newest weights into service
        waits for     a version newer than the served one, or a rollout that joined without
                      weights; then the pin on the weights, and their turn lock; with
                      ``validation.mode: barrier`` also the end of a due evaluation
        unblocked by  settle (a step is trained), admit (a rollout joins); evaluator.run
                      releases the pin and ends evaluations, train releases the lock

    publisher.follow                           lets rollouts load weights from a store at their own pace
        waits for     a version that is complete in the store, and rollouts that load it
        unblocked by  publisher.run (a version is written), admit (a rollout joins)

    evaluator.run                              evaluates one weight version at a time
        waits for     a due evaluation; then the pin on the weights; then the held-out samples
        unblocked by  evaluator.published (called by publisher.run), evaluator.evaluate_served (called for
                      a user); publisher.run releases the pin; evaluator.collect, evaluator.fail

    evaluator.collect                          records held-out samples
        waits for     samples in the ``validation`` partition of the transferqueue
        unblocked by  rollouts, which store samples

    evaluator.exclude_lost                     excludes lost held-out groups from the scores
        waits for     the loss of a shard of the transferqueue
        unblocked by  the transferqueue, which reports the lost keys

    steps.observers.watch                      runs installed observers, such as live advice
        waits for     a committed step
        unblocked by  train

    _stall_reporter.watch                      reports why no step is trained
        waits for     a committed step, or the end of its patience
        unblocked by  train

    _raise_fault                               ends the run
        waits for     an error in the processing of a worker's failure report
        unblocked by  fail

A loop that raises ends all of them; ``RunDriver`` then decides if the run recovers.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Never

import sqlalchemy as sa

from services.common.callables import load_callable
from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.host import Clock
from services.common.runspec.weight_modes import TRANSPORTS
from services.common.stores import is_url, sample_reports
from services.common.task_group import TaskGroup
from services.controller.membership import Worker
from services.controller.rules.evaluation import (
    Evaluation,
    StartedEvaluation,
    is_periodic,
    score_of,
)
from services.controller.rules.ledger import RUNNING, Group, Ledger
from services.controller.rules.mismatch import mismatch, without_quantization
from services.controller.run.connections import RunConnections
from services.controller.run.dispatch.scheduler import (
    CUT_OFF_EVERY_S,
    GenerationScheduler,
    cut_off_notes,
)
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.observe.progress import Progress
from services.controller.run.observe.waits import StallReporter, Waits
from services.controller.run.publisher import Publisher
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec, RequestQueue, end_quantization
from services.controller.run.state.worker_failures import RolloutsOutdatedError
from services.controller.run.train.checkpoints import Checkpoints, ready_checkpoints
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing
from services.controller.run.train.train_step import EarlyTraining, TrainSteps, take_batch
from services.controller.store.records import Note
from services.controller.store.rows import Request
from services.controller.store.runs import Work
from services.wire.controller import GroupFailure
from services.wire.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)

# Max steps by which the trainer may be ahead of the served weights: the largest allowed staleness
# bound.
_MAX_UNSERVED = 64
# Seconds that the end of a run waits for the uploads of its checkpoints.
_UPLOAD_TIMEOUT_S = 1800.0


@dataclass(slots=True, kw_only=True)
class TrainingPipeline:
    """Loops and shared state of one run whose workers are connected."""

    spec: CurrentSpec
    clock: Clock
    """Clock of the stall reporter."""
    journal: Journal
    request_queue: RequestQueue
    waits: Waits
    connections: RunConnections
    queue: TransferQueueClient
    ledger: Ledger
    scheduler: GenerationScheduler
    evaluator: Evaluator
    progress: Progress
    steps: TrainSteps
    early: EarlyTraining
    publisher: Publisher
    gpu_time_sharing: GpuTimeSharing
    checkpoints: Checkpoints
    version_offset: int
    """Weight version of a step minus the step."""
    step: int
    """Last committed step."""
    begun: int | None
    """Step that was sent to the trainer but not committed when the run was restored; None without one."""
    published: int
    """Newest weight version that was published when the run was restored; -1 if none was since the start,
    or since the run was rewound."""
    activity: str = ""
    _lacks_uploads: bool = field(default=False, init=False)
    """True if the object store does not have a checkpoint that the trainer has saved."""
    _stall_reporter: StallReporter = field(init=False)
    _fault: asyncio.Future[Never] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self._stall_reporter = StallReporter(
            journal=self.journal,
            waits=self.waits,
            ledger=self.ledger,
            groups_per_step=self.spec.now.trainer.prompts_per_step,
            clock=self.clock,
            activity=lambda: self.activity,
        )
        self.evaluator.report_to(self.record_evaluation)

    def activities(self) -> list[str]:
        """Returns the run's current activities, such as ``TRAINING``."""
        activities = {
            self.activity: bool(self.activity),
            "SYNCING_WEIGHTS": self.publisher.is_busy,
            "GENERATING": self.ledger.count(*RUNNING) > 0,
            "VALIDATING": self.evaluator.is_busy,
        }
        return [name for name, is_true in activities.items() if is_true]

    @property
    def is_done(self) -> bool:
        """True if no step is left to train."""
        return self.spec.now.validation.only or self.step >= self.spec.num_steps

    @property
    def is_published(self) -> bool:
        """True if the weights of the last step are to be published to the rollouts."""
        spec = self.spec.now
        if self.step in (0, self.spec.num_steps):
            return True
        if spec.algorithm.num_demonstrations:  # published for evaluation only
            return is_periodic(self.step, spec.validation.every)
        return self.step % spec.weight_sync.publish_every == 0

    @property
    def is_barrier(self) -> bool:
        """True if the last step's weights must be served, or evaluated, before the next step starts."""
        validation = self.spec.now.validation
        is_evaluated = is_periodic(self.step, validation.every) and self.is_published
        return self.gpu_time_sharing.is_needed or (validation.mode == "barrier" and is_evaluated)

    @property
    def is_save_due(self) -> bool:
        """True if a checkpoint of the last step is due; the final checkpoint is saved by :meth:`finish`.

        A periodic checkpoint waits for a step that changes the weights.
        """
        is_turn = self.progress.skipped_since is None and self.checkpoints.is_due(
            self.step, self.spec.now.trainer.checkpoint
        )
        return (self._is_save_requested or is_turn) and not self.is_done

    @property
    def _is_final_save_due(self) -> bool:
        """True if the last step of the run is to be saved."""
        spec = self.spec.now.trainer.checkpoint
        is_due = self.checkpoints.is_due(self.step, spec)
        is_unsaved = self.step != self.checkpoints.saved_step
        return self._is_save_requested or (is_unsaved and (spec.at_end or is_due))

    @property
    def _is_save_requested(self) -> bool:
        return self.request_queue.get("save") is not None

    def background(self) -> Sequence[Coroutine[None, None, None]]:
        """Returns the loops that run concurrently with the steps until they are cancelled."""
        return (
            self.scheduler.collect(),
            self.scheduler.replace_lost(),
            self.scheduler.follow_cut_off(),
            self._report_cut_off(),
            self.evaluator.collect(),
            self.evaluator.exclude_lost(),
            self.evaluator.run(),
            self.publisher.run(),
            self.publisher.follow(),
            self._raise_fault(),
            self._stall_reporter.watch(),
            self.steps.observers.watch(),
            *self._upload_reports(),
            *self._store_reports(),
        )

    def _store_reports(self) -> Sequence[Coroutine[None, None, None]]:
        sync = self.spec.now.weight_sync
        if sync.storage is None or not sync.is_stored or not TRANSPORTS[sync.backend].reports:
            return ()
        report = load_callable(TRANSPORTS[sync.backend].reports)
        weights, directory = self.connections.weights, sync.storage.directory
        return (report(self.journal.run_id, directory, weights, record=self._record),)

    def _upload_reports(self) -> Iterator[Coroutine[None, None, None]]:
        if reports := sample_reports(self.spec.now.samples.directory):
            upload = partial(self.queue.sample_upload, self.journal.run_id)
            yield reports(upload, self._record).watch()

    async def _record(self, note: Note) -> None:
        await self.journal.record_event(note, self.ledger)

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Processes reports of groups that produced no samples.

        An error that ends the run is raised by :meth:`_raise_fault`, not to the worker that sent the report.

        Raises:
            UnavailableError: If the worker should send the report again.
        """
        try:
            await self.evaluator.fail(failures)
            await self.scheduler.fail(failures)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 -- any error ends the run, never the reporting worker
            if not self._fault.done():
                self._fault.set_exception(error)

    async def _report_cut_off(self) -> None:
        """Reports workers besides trainer and rollouts that cannot reach the transferqueue, or can again."""
        earlier: set[str] = set()
        while True:
            now = {w.worker_id: w.activity for w in self.connections.other_workers if w.is_cut_off}
            causes = {name: now[name] for name in sorted(now.keys() - earlier)}
            back = sorted(earlier - now.keys())
            for note in cut_off_notes("WorkerCutOff", causes, "WorkerReconnected", back):
                await self.journal.record_event(note, self.ledger)
            earlier = {*now}
            await asyncio.sleep(CUT_OFF_EVERY_S)

    async def _raise_fault(self) -> None:
        """Raises the error that a failure report caused."""
        await self._fault

    async def catch_up(self) -> None:
        """Finishes the step in progress or returns its groups; brings the newest weights to every rollout.

        At last does what is due after the last committed step, which an earlier attempt may have left undone.
        """
        if self.begun is not None:
            is_untrained = self.connections.trained < self.begun
            if self.connections.scoring.needs_weights and is_untrained:
                # A restarted worker scores the step under the weights that the step starts from.
                await self.publish()
            if await self.steps.recover(self.begun):
                self.step = self.begun
        served_step = self.published - self.version_offset
        is_due = served_step < self.step and self.is_published
        # Engines that slept hold no weights; those that a rewind lost are not served any more.
        is_served = (
            self.connections.served == self.published >= 0 and not self.gpu_time_sharing.is_needed
        )
        if is_served and is_due and self.evaluator.interrupted == self.published:
            # The interrupted evaluation is repeated before another version replaces this one.
            await self.publisher.record_served(served_step)
            await self.offer()
        elif is_due or not is_served:
            await self.publish()
        else:
            if served_step == self.step:
                await self.connections.weights.retain_copy(self.published)
            await self.publisher.record_served(served_step)
        self._open_gate()
        await self.settle()

    async def settle(self) -> None:
        """Does what is due after the last committed step: publishes and evaluates it, saves a checkpoint.

        The committed step and the records decide what is due, so that repetitions do nothing.
        """
        if self.is_published:
            await self.offer()
        if self.is_barrier:
            await self.publish()
        if self.is_save_due:
            await self.save()

    async def take_batch(self) -> list[Group] | None:
        """Waits for the groups of the next step; returns None if the steps are to end first."""
        self.activity, spec = "", self.spec.now
        version, meanwhile = self.step + self.version_offset, None
        if spec.trainer.accumulate_early:
            meanwhile = self.early.accumulate(
                self.step + 1, weight_version=version, timeout_s=spec.limits.step_timeout_s
            )
        return await take_batch(
            self.scheduler,
            self.ledger,
            spec.algorithm,
            weight_version=version,
            clock=self.clock,
            waits=self.waits,
            unless=self.request_queue.pausing,
            meanwhile=meanwhile,
        )

    async def train(self, batch: Sequence[Group], *, begin: float) -> None:
        """Trains the next step and commits it.

        Args:
            begin: ``time.perf_counter()`` at which the wait for the groups began.
        """
        self.activity, step = "TRAINING", self.step + 1
        if self.connections.scoring.needs_weights:
            # Workers score the batch under the weights that the step starts from.
            await self.publish()
        await self.steps.begin(step, batch)
        await self.steps.train(step, batch, begin=begin)
        self.step = step
        self._open_gate()
        self._stall_reporter.record_step()
        await self._check_mismatch()

    async def _check_mismatch(self) -> None:
        """Ends the quantization of rollouts whose policy diverges too far from the trainer's.

        Raises:
            RolloutsOutdatedError: If the rollouts must restart.
        """
        report = mismatch([*self.steps.divergences], self.spec.now)
        if report is None or self.is_done:
            return
        store = end_quantization(self.journal.run_id)
        ask = self.request_queue.added("restart_rollouts")

        def write(connection: sa.Connection) -> None:
            store(connection)
            ask(connection)

        logger.warning(
            "quantization ends", extra={"run": self.journal.run_id, "why": report.message}
        )
        data = {"step": self.step, "kl_rollout": report.kl, "max_mismatch": report.limit}
        await self.record_event("QuantizationEnded", report.message, data, also=write)
        self.spec.now = without_quantization(self.spec.now)
        raise RolloutsOutdatedError(report.message)

    def _open_gate(self) -> None:
        """Opens the staleness gate for rows with demonstrations, which need no published weights."""
        if self.spec.now.algorithm.num_demonstrations:
            self.scheduler.published(self.step)

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Lets loaded rollouts join; returns False if the current weight transport does not reach them."""
        if not await self.publisher.admit(rollouts):
            return False
        self.steps.observers.reset()
        return True

    async def detach(self, names: Collection[str]) -> None:
        """Moves the groups of rollouts to other rollouts, waits for their evaluations, disconnects them."""
        await self.scheduler.reclaim_from_leaving(names)
        await self.evaluator.exclude_rollouts(names)
        await self.connections.remove_rollouts(names)
        await self.publisher.forget(names)
        self.steps.observers.reset()

    async def offer(self) -> None:
        """Offers the weights of the last step to the publisher, without waiting for the rollouts."""
        await self.publisher.offer(self.step)

    async def publish(self) -> None:
        """Publishes the weights of the last step and waits until they are served."""
        await self.offer()
        with self.waits("weight_sync"):
            await self.publisher.wait_served(self.step)

    async def save(self) -> None:
        """Saves a checkpoint of the last step."""
        if self.step == 0:
            return
        self.activity = "CHECKPOINTING"
        with self.waits("checkpoint"):
            is_saved = await self.checkpoints.save(
                self.connections.trainer,
                self.connections.critic,
                self.ledger,
                step=self.step,
                version=self.step + self.version_offset,
                keep_steps=self._protected_steps(),
                skipped_since=self.progress.skipped_since,
                also=self.request_queue.done(self.request_queue.get("save")),
            )
        if not is_saved:
            self.progress.forget_score(self.step)

    def _protected_steps(self) -> set[int]:
        """Returns steps whose checkpoints are kept regardless of age: the best one and candidates for it."""
        if self.spec.now.trainer.checkpoint.best is None:
            return set()
        best, offset = self.progress.best, self.version_offset
        steps = set() if best is None else {int(best["step"])}
        steps |= {version - offset for version in self.evaluator.pending_versions}
        # Versions that are not served yet will still be evaluated.
        served = max(self.evaluator.version - offset, self.step - _MAX_UNSERVED)
        return steps | set(range(served + 1, self.step))

    async def is_saved(self) -> bool:
        """Returns True if the run can resume after its last step without the trainer's host."""
        if self._lacks_uploads:
            return False
        checkpoints = await self.journal.read(ready_checkpoints)
        return self.step == 0 or any(checkpoint.step == self.step for checkpoint in checkpoints)

    async def finish(self) -> None:
        """Ends the run, or its steps; a paused run keeps unfinished groups in its checkpoint."""
        self.activity = ""
        if self.is_done:
            await self.publisher.wait_idle()
            # The last weights are served already, so they are evaluated while the checkpoint is
            # written.
            async with TaskGroup() as tasks:
                if self._is_final_save_due:
                    tasks.create_task(self.save())
                tasks.create_task(self.evaluator.wait_idle())
            self.activity = "FINALIZING"
            await self._await_uploads()
            return
        # Weight transfers to rollouts are not awaited: the rollouts end, and receive weights when
        # they restart.
        if self.spec.now.rollout.partial_rollout:
            await self.connections.rollout_pool.interrupt()
        pause = self.request_queue.get("pause")
        if self._is_save_requested or pause is None or pause.options["checkpoint"]:
            await self.save()
        await self._await_uploads()

    async def _await_uploads(self) -> None:
        """Waits, before the trainer ends, until the object store has what it saved.

        A store that stays unreachable does not fail the run: an event says what is missing there.
        """
        url = self.spec.now.trainer.checkpoint.directory
        if url is None or not is_url(url):
            return
        with self.waits("checkpoint"):
            try:
                await asyncio.gather(
                    self.connections.trainer.await_uploads(timeout_s=_UPLOAD_TIMEOUT_S),
                    self.connections.critic.await_uploads(timeout_s=_UPLOAD_TIMEOUT_S),
                )
                note = Note("CheckpointsUploaded", f"{url} has all checkpoints", {"url": url})
            except (FailedPreconditionError, DeadlineExceededError) as error:
                self._lacks_uploads = True
                note = Note("CheckpointNotUploaded", error.message, {"url": url})
            await self.journal.record_event(note, self.ledger)

    async def record_evaluation(
        self, evaluation: StartedEvaluation | Evaluation, request: Request | None = None
    ) -> None:
        """Records the start or the end of an evaluation, and completes the request that asked for it."""
        self.progress.record_evaluation(evaluation)
        if isinstance(evaluation, StartedEvaluation):
            kind, message = "ValidationStarted", f"evaluation started ({evaluation.reason})"
        else:
            kind, message = "Validated", f"greedy {evaluation.greedy}, sampled {evaluation.sampled}"
            if evaluation.status != "ok":
                message = f"{evaluation.status}, {message}"
            message += await self._compare_with_best(evaluation)
        message = f"weight version {evaluation.version}: {message}"
        await self.record_event(
            kind, message, asdict(evaluation), also=self.request_queue.done(request)
        )

    async def _compare_with_best(self, evaluation: Evaluation) -> str:
        """Compares an evaluated checkpoint with the best one; returns text for the event's message."""
        best, step = self.spec.now.trainer.checkpoint.best, evaluation.step
        if best is None or evaluation.status != "ok" or step == 0:
            return ""
        is_due = self._is_final_save_due if self.is_done else self.is_save_due
        ready = await self.journal.read(ready_checkpoints)
        if not (is_due and step == self.step) and step not in {row.step for row in ready}:
            return "; no checkpoint has this version"
        score = score_of(evaluation, best)
        if score is None:
            return f"; cannot compare it by trainer.checkpoint.best: it has no {best.metric}"
        self.progress.record_score(score, step=step, version=evaluation.version)
        is_best = self.progress.best is not None and self.progress.best["step"] == step
        return ", the best checkpoint so far" if is_best else ""

    async def record_event(
        self,
        type_: str,
        message: str,
        data: Mapping[str, object],
        *,
        also: Work | None = None,
    ) -> None:
        """Writes an event with a summary of the run's progress."""
        summary = self.progress.summary(self.ledger)
        note = Note(type_, message, data, None, None, summary)
        await self.journal.record_event(note, self.ledger, also=also)
