"""One rank's part in training: plans a batch, fetches its share of the samples and trains them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from services.common.callables import load_callable
from services.common.errors import FailedPreconditionError, NotFoundError
from services.common.runspec.run import RECORDERS, RunSpec
from services.common.telemetry.metrics import PhaseTimer
from services.trainer.batch.samples import (
    BatchFacts,
    Samples,
    build_samples,
    empty_samples,
    wanted_fields,
)
from services.trainer.batch.step_plan import StepPlan, plan_step, shard_of
from services.trainer.checkpoint.checkpointer import Checkpointer, Snapshot
from services.trainer.engines.base import OomLimitError, TrainEngine, score_text
from services.trainer.ranks.training_recorder import TrainingRecorder
from services.trainer.steps.step import StepResult
from services.trainer.steps.updates import NonFiniteGuard, nonfinite_inputs
from services.trainer.transfers import Fetch, fetch_model_inputs
from services.weightsync.canary import Canary, canary_text
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand


class StepRecorder(Protocol):
    """Records the steps of one rank."""

    written_s: float
    """CPU seconds that the newest complete record of a step took in addition to the training."""

    def begin(self, step: int, spec: RunSpec, engine: TrainEngine) -> None:
        """Records a start that continues after ``step``; all ranks call it."""

    def recorded(self, fetch: Fetch) -> Fetch:
        """Returns a fetch that also records what it fetched."""

    def finish(self, command: StepCommand, result: StepResult, *, engine: TrainEngine) -> None:
        """Records a trained step; may wait for the record of the step before."""

    def accumulated(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Records groups that were trained before their batch was complete."""

    def wait(self) -> None:
        """Waits until everything is written."""


RecorderMaker = Callable[[Path, int, TrainEngine], StepRecorder]
"""Takes the folder of the checkpoints, this process's rank and the engine of the policy."""


def prepare_recorder(spec: RunSpec) -> RecorderMaker | None:
    """Returns what makes the recorder that ``record`` names, or None; call it before a model is loaded."""
    if spec.record == "off":
        return None
    maker: RecorderMaker = load_callable(RECORDERS[spec.record])(spec)
    return maker


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepProfiler:
    """Writes profiler traces of chosen steps."""

    folder: Path
    """Folder of the traces; created with the first one."""
    rank: int = 0
    steps: frozenset[int] = frozenset()
    """Steps to profile."""

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profiles the block if ``step`` was chosen.

        Operations and, on a GPU, kernels are written to ``step-S-rank-R.json.gz`` as a Chrome trace.
        """
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{step}-rank-{self.rank}.json.gz"
        profiler.export_chrome_trace(str(file))
        logger.info("profile written", extra={"step": step, "file": str(file)})


NO_PROFILES = StepProfiler(Path("profiles"))


class Runner(Protocol):
    """Trainer of one model: of the policy, or of a critic that has its own processes."""

    num_steps: int
    """Steps of the whole run, over which learning rates are scheduled."""
    engine: TrainEngine
    """Engine of the model."""

    def accumulate(
        self, weight_version: int, samples: Samples, facts: BatchFacts, plan: StepPlan
    ) -> None:
        """Accumulates gradients of some groups of the next batch."""

    def drop_gradients(self) -> None:
        """Drops all accumulated gradients."""

    def run(
        self,
        weight_version: int,
        samples: Samples,
        facts: BatchFacts,
        plan: StepPlan,
        *,
        step: int | None = None,
    ) -> StepResult:
        """Trains one batch."""

    def trained(self) -> dict[str, TrainEngine]:
        """Returns the engines that train, by the subfolder of their checkpoint."""

    def engines(self) -> list[TrainEngine]:
        """Returns all engines."""

    def facts(self) -> dict[str, float]:
        """Returns the numbers that a checkpoint stores besides the tensors."""

    def restore(self, facts: Mapping[str, float]) -> None:
        """Restores the numbers of a checkpoint."""


_Sample = tuple[str, object]
"""Key and attempt of a sample."""


@dataclass(frozen=True, slots=True)
class _Share:
    """A planned batch with this rank's samples."""

    facts: BatchFacts
    plan: StepPlan
    samples: Samples


class Rank:
    """One rank's part in training. All ranks must make the same calls in the same order.

    Args:
        checkpointer: Saves and loads the engines that train.
        recorder: Records how samples were trained, for people to read; None on other ranks.
        step_recorder: Records the steps, to replay them; None if the run has no record.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        fetch: Fetch,
        spec: RunSpec,
        checkpointer: Checkpointer,
        profiler: StepProfiler = NO_PROFILES,
        recorder: TrainingRecorder | None = None,
        step_recorder: StepRecorder | None = None,
    ) -> None:
        self.runner = runner
        self.checkpointer = checkpointer
        self._fetch = fetch if step_recorder is None else step_recorder.recorded(fetch)
        self._step_recorder = step_recorder
        self._recorder = recorder
        self._spec = spec
        self._ranks = runner.engine.ranks
        self._is_asleep = False
        self._profiler = profiler
        self._guard = NonFiniteGuard(
            spec.algorithm.max_nonfinite_steps, suspects=spec.algorithm.own_functions
        )
        self._early: tuple[int, frozenset[_Sample]] = (-1, frozenset())

    def accumulate(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Accumulates gradients of some groups of the next step. Blocks; runs in a thread.

        The step then trains only its other groups. If an accumulated group does not belong to the step, the
        rank drops all accumulated gradients and trains the whole step.

        Args:
            meta: The groups; those that were accumulated before are skipped.
            weight_version: Version of the weights that the step starts from.

        Raises:
            IncompleteBatchError: If the groups lack what the algorithm needs.
        """
        runner = self.runner
        if self._early[0] != weight_version:
            self._drop_accumulated()
        samples = _samples_of(meta)
        new = [index for index, sample in enumerate(samples) if sample not in self._early[1]]
        if not new:
            return
        share = self._share(meta.select(new), weight_version, num_updates=1)
        if self._any_rank_has(nonfinite_inputs(share.samples, share.facts)):
            return  # the step itself reports this and is skipped
        try:
            runner.accumulate(weight_version, share.samples, share.facts, share.plan)
        except OomLimitError as error:
            self._drop_accumulated()
            if self._spec.trainer.world_size > 1:
                raise
            logger.warning("groups wait for their step", extra={"error": str(error)})
            return
        except BaseException:
            self._drop_accumulated()
            raise
        self._early = weight_version, self._early[1] | frozenset(samples)
        if self._step_recorder is not None:
            self._step_recorder.accumulated(meta.select(new), weight_version=weight_version)

    def _drop_accumulated(self) -> None:
        self.runner.drop_gradients()
        self._early = (-1, frozenset())
        if self._recorder is not None:
            self._recorder.discard()

    def _without_accumulated(self, meta: KVBatchMeta, weight_version: int) -> KVBatchMeta:
        """Returns the part of a batch that is not accumulated yet.

        Returns the whole batch, and drops the gradients, if the accumulated groups are not a part of it.
        """
        samples, early = _samples_of(meta), self._early[1]
        if self._early[0] == weight_version and early < set(samples):
            return meta.select([i for i, sample in enumerate(samples) if sample not in early])
        self._drop_accumulated()
        return meta

    def train(self, command: StepCommand) -> StepResult:
        """Trains a batch. Blocks; runs in a thread.

        Raises:
            IncompleteBatchError: If the batch lacks what the algorithm needs.
            NotFiniteError: If too many consecutive steps were skipped, even after going back to a
                checkpoint or without one to go back to, or gradients overflowed in float16 at the lowest
                loss scale.
        """
        step, meta, version = command.step, command.batch, command.version
        if command.num_steps is not None:
            self.runner.num_steps = command.num_steps
        remaining = self._without_accumulated(meta, version)
        try:
            result = self._trained(step, remaining, version)
        except OomLimitError:
            if remaining is meta or self._spec.trainer.world_size > 1:
                raise
            # Accumulated gradients are dropped, so the whole step starts over.
            result = self._trained(step, meta, version)
        if result.overflowed:
            logger.warning("step skipped: overflow", extra={"step": step})
        elif result.skipped:
            logger.error("step skipped", extra={"step": step, "keys": " ".join(meta.keys[:64])})
        is_skipped = result.skipped or bool(result.metrics.get("critic_skipped"))
        # A lower loss scale ends overflows; the lowest one has its own limit.
        if not result.overflowed and self._guard.must_rewind(step, skipped=is_skipped):
            result.metrics["rewound_to_step"] = float(self._rewind(step))
        if self._step_recorder is not None:
            timer = PhaseTimer()
            with timer("record"):
                recorded = replace(command, num_steps=self.runner.num_steps)
                self._step_recorder.finish(recorded, result, engine=self.runner.engine)
            result.metrics["seconds_record"] = timer.seconds["record"]
            result.metrics["record_thread_s"] = self._step_recorder.written_s
        seconds = sum(v for name, v in result.metrics.items() if name.startswith("seconds_"))
        result.metrics["seconds_total"] = seconds
        result.metrics["tokens_per_s"] = result.metrics.get("tokens", 0.0) / max(seconds, 1e-9)
        return result

    def _rewind(self, step: int) -> int:
        """Restores the last checkpoint before the consecutive skipped steps; returns its step.

        Raises:
            NotFiniteError: If there is none.
        """
        first = self._guard.first_skipped
        try:
            facts = self.checkpointer.load(before=first)
        except NotFoundError as error:
            since = f"step {first}, and no checkpoint is of an earlier step"
            raise self._guard.failure(step, since=since) from error
        self.runner.restore(facts)
        logger.warning("checkpoint restored", extra={"step": step, "restored": int(facts["step"])})
        return int(facts["step"])

    def _trained(self, step: int, meta: KVBatchMeta, weight_version: int) -> StepResult:
        """Trains a batch, or the part of it that is not accumulated yet."""
        timer = PhaseTimer()
        with timer("fetch"):
            share = self._share(
                meta, weight_version, num_updates=self._spec.trainer.updates_per_step
            )
        if self._any_rank_has(nonfinite := nonfinite_inputs(share.samples, share.facts)):
            kind = "reward" if "rewards" in nonfinite else "logprob"
            metrics = {"nonfinite_inputs": 1.0, f"nonfinite_{kind}": 1.0}
            result = StepResult(metrics=metrics, skipped=True)
            self._drop_accumulated()
        else:
            try:
                with self._profiler(step):
                    result = self.runner.run(
                        weight_version, share.samples, share.facts, share.plan, step=step
                    )
            except BaseException:
                self._drop_accumulated()
                raise
            self._early = (-1, frozenset())
            if self._recorder is not None:
                self._recorder.flush(meta.partition_id, step=step, weight_version=weight_version)
        result.metrics["seconds_fetch"] = timer.seconds["fetch"]
        return result

    def snapshot(self, step: int) -> Snapshot:
        """Copies the training state after a step, so that training continues while the copy is written."""
        if self._step_recorder is not None:
            self._step_recorder.wait()
        facts = {"step": step, "first_skipped_step": self._guard.first_skipped}
        return self.checkpointer.snapshot(step, {**facts, **self.runner.facts()})

    def restore(self, folder: Path | None = None) -> int:
        """Restores a checkpoint, by default the run's newest complete one; returns its step.

        Raises:
            NotFoundError: If there is none.
            DataLossError: If ``folder`` is not complete.
            OtherCheckpointError: If the checkpoint is of another model, or lacks one.
        """
        facts = self.checkpointer.load(folder)
        self.runner.restore(facts)
        if folder is None:
            self._guard.first_skipped = int(facts.get("first_skipped_step", 0))
        return int(facts["step"])

    def sleep(self) -> None:
        """Releases device memory for other processes, until :meth:`wake`. Safe to repeat."""
        self._is_asleep = True
        for engine in self.runner.engines():
            engine.sleep()

    def wake(self) -> None:
        """Restores the state of all engines to the device. Safe to repeat."""
        for engine in self.runner.engines():
            engine.wake()
        self._is_asleep = False

    def check_awake(self) -> None:
        """Checks that this rank has its device.

        Raises:
            FailedPreconditionError: If other processes have it.
        """
        if self._is_asleep:
            raise FailedPreconditionError("the trainer is asleep; wake it first")

    def _share(self, meta: KVBatchMeta, weight_version: int, *, num_updates: int) -> "_Share":
        """Plans a batch and fetches this rank's samples; fails on all ranks if one cannot fetch its own."""
        if self._recorder is not None:
            self._recorder.begin(meta)
        fields = wanted_fields(meta, self._spec)
        facts = BatchFacts.from_meta(meta)
        shard = shard_of(
            facts,
            num_updates=num_updates,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            cost=self.runner.engine.model.cost,
            shares_prefixes=self._spec.shares_prefixes,
            keeps_groups=self._spec.algorithm.loss_kind.compares_members,
        )
        samples = empty_samples(fields)
        is_outdated = False
        with self._ranks.fail_together("fetch its share of the batch"):
            if shard.rows:
                columns = self._fetch(meta.select(shard.rows), fields)
                is_outdated = _is_outdated(columns, weight_version)
                samples = build_samples(
                    columns,
                    shard.rows,
                    facts,
                    spec=self._spec.algorithm,
                    weight_version=weight_version,
                    inputs=fetch_model_inputs(self._fetch, meta.select(shard.rows)),
                )
        if self._any(is_outdated):
            samples = samples.without_tokens("proximal_logprobs")
        plan = plan_step(
            shard,
            samples,
            ranks=self._ranks,
            shares_prefixes=self._spec.shares_prefixes,
            bounds=self.runner.engine.bounds,
        )
        return _Share(facts, plan, samples)

    def _any_rank_has(self, names: tuple[str, ...]) -> bool:
        if names:
            logger.error("inputs are not finite", extra={"inputs": " ".join(names)})
        return self._any(bool(names))

    def _any(self, condition: bool) -> bool:
        """Returns True if the condition holds on any rank. All ranks must call it."""
        return bool(self._ranks.sum(torch.tensor([int(condition)])).item())


def canary_of(engine: TrainEngine) -> Canary:
    """Scores a short text at temperature 1. All ranks must call it."""
    token_ids = canary_text(engine.model.config.vocab_size)
    # Not compiled: in a colocated run, the first weights would wait for a graph that no step needs.
    with torch.compiler.set_stance("force_eager"):
        return Canary(token_ids, tuple(score_text(engine, token_ids)))


def _samples_of(meta: KVBatchMeta) -> list[_Sample]:
    return list(zip(meta.keys, meta.tags.get("attempt", meta.keys), strict=True))


def _is_outdated(columns: Mapping[str, Jagged], weight_version: int) -> bool:
    """Returns True if proximal logprobs belong to other weights than the step starts from.

    This happens if the trainer went back to a checkpoint after they were computed; it then computes its own.
    """
    versions = columns.get("proximal_version")
    return versions is not None and bool((versions.values != weight_version).any())
