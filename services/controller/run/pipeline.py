"""A run that is being trained: what it is made of, and what is done with it between two events."""

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Never

from services.common.clock import Clock
from services.common.errors import UnavailableError
from services.common.task_group import TaskGroup
from services.controller.client import GroupFailure
from services.controller.membership.registry import Worker
from services.controller.rules.evaluation import BegunEvaluation, Evaluation, is_periodic, score_of
from services.controller.rules.groups import RUNNING, Group
from services.controller.rules.ledger import Ledger
from services.controller.run.connections import RunConnections
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.observe.progress import Progress
from services.controller.run.observe.stall_reporter import StallReporter
from services.controller.run.observe.waits import Waits
from services.controller.run.publisher import Publisher
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec, RequestQueue
from services.controller.run.train.batcher import EarlyTraining, take_batch
from services.controller.run.train.checkpoints import Checkpoints
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing
from services.controller.run.train.train_step import TrainSteps
from services.controller.store.records import Note
from services.controller.store.rows import Request
from services.controller.store.runs import Work

# Steps that the trainer is ahead of what rollouts serve, at most: the largest bound on staleness.
_MOST_UNSERVED = 64


@dataclass(slots=True, kw_only=True)
class TrainingPipeline:
    """A run whose workers are connected."""

    spec: CurrentSpec
    clock: Clock
    """For stalls."""
    journal: Journal
    request_queue: RequestQueue
    waits: Waits
    connections: RunConnections
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
    """What weight versions are above their steps."""
    step: int
    """The last committed step."""
    begun: int | None
    """The step that the trainer was asked for and that was not committed when the run was restored."""
    published: int
    """The newest weight version that was published then; -1 before the first."""
    doing: str = ""
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
            activity=lambda: self.doing,
        )

    def activities(self) -> list[str]:
        """What the run is doing now."""
        found = {
            self.doing: bool(self.doing),
            "SYNCING_WEIGHTS": self.publisher.is_busy,
            "GENERATING": self.ledger.count(*RUNNING) > 0,
            "VALIDATING": self.evaluator.is_busy,
        }
        return [name for name, is_true in found.items() if is_true]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.spec.now.validation.only or self.step >= self.spec.num_steps

    @property
    def is_published(self) -> bool:
        """Whether the weights of the last step are for the rollouts."""
        spec = self.spec.now
        if self.step in (0, self.spec.num_steps):
            return True
        if spec.algorithm.num_demonstrations:  # they are only evaluated
            return is_periodic(self.step, spec.validation.every)
        return self.step % spec.weight_sync.publish_every == 0

    @property
    def is_barrier(self) -> bool:
        """Whether the weights of the last step are evaluated, or generate, before anything is trained."""
        validation = self.spec.now.validation
        is_evaluated = is_periodic(self.step, validation.every) and self.is_published
        return self.gpu_time_sharing.are_needed or (validation.mode == "barrier" and is_evaluated)

    @property
    def is_save_due(self) -> bool:
        """Whether a checkpoint of the last step is wanted, and not the one behind the last step of all."""
        is_asked = self.request_queue.get("save") is not None
        is_turn = self.checkpoints.is_due(self.step, self.spec.now.trainer.checkpoint)
        return (is_asked or is_turn) and not self.is_done

    def background(self) -> Sequence[Coroutine[None, None, None]]:
        """What goes on beside the steps, for ever."""
        return (
            self.scheduler.collect(),
            self.scheduler.replace_lost(),
            self.evaluator.collect(),
            self.evaluator.leave_out_lost(),
            self.evaluator.run(),
            self.publisher.run(),
            self._end_of_faults(),
            self._stall_reporter.watch(),
            self.steps.advisor.watch(),
        )

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Take in groups that brought no samples; if the run ends of it, that is not the reporter's fault.

        Raises:
            UnavailableError: If it can be reported again.
        """
        try:
            await self.evaluator.fail(failures)
            await self.scheduler.fail(failures)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever it is, the run ends, and no worker
            if not self._fault.done():
                self._fault.set_exception(error)

    async def _end_of_faults(self) -> None:
        """Raise what a report led to."""
        await self._fault

    async def catch_up(self) -> None:
        """Settle the step that was being trained; see that every rollout serves the newest weights."""
        if self.begun is not None:
            is_untrained = self.connections.trained < self.begun
            if self.connections.scoring.is_active and is_untrained:
                # A worker that was started again scores the step under the weights that it starts from.
                await self.publish()
            if await self.steps.settle(self.begun):
                self.step = self.begun
        served_step = self.published - self.version_offset
        is_due = served_step < self.step and self.is_published
        # Engines that slept have no weights.
        is_served = (
            self.connections.served == self.published and not self.gpu_time_sharing.are_needed
        )
        if is_served and is_due and self.evaluator.interrupted == self.published:
            # Its evaluation is repeated before another version takes its place.
            await self.publisher.already(served_step)
            await self.offer()
        elif is_due or not is_served:
            await self.publish()
        else:
            if served_step == self.step:
                await self.connections.weights.keep(self.published)
            await self.publisher.already(served_step)
        self._open_gate()

    async def take_batch(self) -> list[Group] | None:
        """Wait for the groups of the next step; None if a pause came before them."""
        self.doing, spec = "", self.spec.now
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
        """Train the next step, which began to wait for its groups at ``begin``."""
        self.doing, step = "TRAINING", self.step + 1
        if self.connections.scoring.is_active:
            # Workers of the role logp score the batch under the weights that the step starts from.
            await self.publish()
        await self.steps.begin(step, batch)
        await self.steps.train(step, batch, begin=begin)
        self.step = step
        self._open_gate()
        self._stall_reporter.stepped()

    def _open_gate(self) -> None:
        """Let the rows of further steps be prepared, if no weights have to be published for that."""
        if self.spec.now.algorithm.num_demonstrations:
            self.scheduler.published(self.step)

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Have rollouts take part that have loaded; returns whether weights reach them as they travel now."""
        if not await self.publisher.admit(rollouts):
            return False
        self.steps.advisor.begin_anew()
        return True

    async def detach(self, names: Collection[str]) -> None:
        """Have rollouts finish or hand over all that they do, and forget them."""
        await self.scheduler.reclaim_from_leaving(names)
        await self.evaluator.without(names)
        await self.connections.dismiss(names)
        self.steps.advisor.begin_anew()

    async def offer(self) -> None:
        """Have the weights of the last step brought into service beside training."""
        await self.publisher.offer(self.step)

    async def publish(self) -> None:
        """Bring the weights of the last step into service, and wait for it."""
        await self.offer()
        with self.waits("weight_sync"):
            await self.publisher.served(self.step)

    async def save(self) -> None:
        """Save a checkpoint of the last step."""
        if self.step == 0:
            return
        self.doing = "CHECKPOINTING"
        with self.waits("checkpoint"):
            await self.checkpoints.save(
                self.connections.trainer,
                self.connections.critic,
                self.ledger,
                step=self.step,
                version=self.step + self.version_offset,
                keep_steps=self._kept_steps(),
                also=self.request_queue.done(self.request_queue.get("save")),
            )

    def _kept_steps(self) -> set[int]:
        """Steps whose checkpoints stay though they are old: the best one, and those that may become it."""
        if self.spec.now.trainer.checkpoint.best is None:
            return set()
        best, offset = self.progress.best, self.version_offset
        kept = set() if best is None else {int(best["step"])}
        kept |= {version - offset for version in self.evaluator.in_turn}
        # Those that rollouts do not serve yet will be evaluated.
        served = max(self.evaluator.version - offset, self.step - _MOST_UNSERVED)
        return kept | set(range(served + 1, self.step))

    async def finish(self) -> None:
        """End the run, or hold it: what is unfinished is kept, with the checkpoint, for another day."""
        self.doing = ""
        if self.is_done:
            await self.publisher.settled()
            # The last weights are served already: they are evaluated while the checkpoint is written.
            async with TaskGroup() as tasks:
                tasks.create_task(self.save())
                tasks.create_task(self.evaluator.idle())
            self.doing = "FINALIZING"
            return
        # Weights on their way to rollouts are not waited for: these end, and get them when they start again.
        if self.spec.now.rollout.partial_rollout:
            await self.connections.replicas.interrupt()
        pause, is_asked = (
            self.request_queue.get("pause"),
            self.request_queue.get("save") is not None,
        )
        if is_asked or pause is None or pause.options["checkpoint"]:
            await self.save()

    async def evaluated(
        self, what: BegunEvaluation | Evaluation, request: Request | None = None
    ) -> None:
        """Tell of an evaluation that begins or ends, with the request that it answers."""
        if isinstance(what, BegunEvaluation):
            kind, message = "ValidationStarted", f"is being evaluated: {what.reason}"
        else:
            self.progress.evaluated(what)
            kind, message = "Validated", f"greedy {what.greedy}, sampled {what.sampled}"
            if what.status != "ok":
                message = f"{what.status}, {message}"
            message += self._compared(what)
        message = f"weight version {what.version}: {message}"
        await self.note(kind, message, asdict(what), also=self.request_queue.done(request))

    def _compared(self, what: Evaluation) -> str:
        """See whether a checkpoint is the best one; returns what there is to say of it."""
        checkpoint, step = self.spec.now.trainer.checkpoint, what.version - self.version_offset
        is_saved = step > 0 and (
            step == self.spec.num_steps or (checkpoint.every and step % checkpoint.every == 0)
        )
        if checkpoint.best is None or what.status != "ok" or not is_saved:
            return ""
        score = score_of(what, checkpoint.best)
        if score is None:
            return f"; there is no {checkpoint.best.metric} for trainer.checkpoint.best to compare"
        self.progress.scored(score, step=step, version=what.version)
        is_best = self.progress.best is not None and self.progress.best["step"] == step
        return ", the best checkpoint so far" if is_best else ""

    async def note(
        self,
        type_: str,
        message: str,
        data: Mapping[str, object],
        *,
        also: Work | None = None,
    ) -> None:
        """Write an event, with the run's progress."""
        summary = self.progress.summary(self.ledger)
        note = Note(type_, message, data, None, None, summary)
        await self.journal.note(note, self.ledger, also=also)
