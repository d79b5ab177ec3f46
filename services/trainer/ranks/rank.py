"""What one trainer process does with a batch: its share of the plan, fetched and trained."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from services.common.batch import KVBatchMeta
from services.common.jagged import Jagged
from services.common.runspec.run import RunSpec
from services.trainer.batch.guard import NonFiniteGuard, nonfinite_inputs
from services.trainer.batch.plan import StepPlan, plan_step, shard_of
from services.trainer.batch.samples import (
    BatchFacts,
    Samples,
    build_samples,
    empty_samples,
    wanted_fields,
)
from services.trainer.checkpoint.checkpointer import Checkpointer, Snapshot
from services.trainer.collectives import Ranks
from services.trainer.phases import PhaseTimer
from services.trainer.ranks.training_recorder import TrainingRecorder
from services.trainer.steps.oom import OomLimitError, OomLimits
from services.trainer.steps.step import StepResult, StepRunner
from services.trainer.transfers import Fetch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepProfiler:
    """Writes what a process does in some of the steps."""

    folder: Path
    """Where profiles go; made when there is one."""
    rank: int = 0
    """This process among all of the worker."""
    steps: frozenset[int] = frozenset()
    """Steps that are profiled."""

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Around a step: its operations and, on a GPU, its kernels become ``step-S-rank-R.json.gz``."""
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
    """Trains something: the policy, or the critic where it has processes of its own."""

    num_steps: int
    """Steps of the whole run, over which learning rates are scheduled."""
    oom_limits: OomLimits
    """What did not fit into memory before."""

    def run(
        self, weight_version: int, samples: Samples, cohort: BatchFacts, plan: StepPlan
    ) -> StepResult:
        """Train one batch."""

    def parts(self) -> dict[str, tuple[nn.Module, torch.optim.AdamW]]:
        """What is trained, with its optimizer, by the prefix of its names."""

    def facts(self) -> dict[str, float]:
        """Numbers that a checkpoint keeps besides the tensors."""

    def restore(self, facts: Mapping[str, float]) -> None:
        """Continue from the numbers of a checkpoint."""


_Sample = tuple[str, object]
"""Key and attempt."""


@dataclass(frozen=True, slots=True)
class _Share:
    """A batch, and what one rank has of it."""

    cohort: BatchFacts
    plan: StepPlan
    samples: Samples


class Rank:
    """One rank's part in training. Every rank must be asked the same, in the same order.

    Args:
        runner: Trains.
        fetch: Brings samples from the transferqueue.
        spec: The run.
        ranks: Data-parallel ranks.
        cost: Cost of a sequence by its length, for balancing.
        checkpointer: Saves and loads what is trained.
        profiler: Writes profiles of chosen steps.
        recorder: Tells people of samples that are kept; None on ranks that are not asked.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        fetch: Fetch,
        spec: RunSpec,
        ranks: Ranks,
        cost: Callable[[int], float],
        checkpointer: Checkpointer,
        profiler: StepProfiler = NO_PROFILES,
        recorder: TrainingRecorder | None = None,
    ) -> None:
        self.runner = runner
        self.checkpointer = checkpointer
        self._fetch = fetch
        self._recorder = recorder
        self._spec = spec
        self._ranks = ranks
        self._cost = cost
        self._profiler = profiler
        self._guard = NonFiniteGuard(
            spec.algorithm.max_nonfinite_steps, suspects=spec.algorithm.own_functions
        )
        self._early: tuple[int, frozenset[_Sample]] = (-1, frozenset())

    def accumulate(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Add the gradients of some groups of the next step. Blocks; runs in a thread.

        The step itself then trains the others. Groups that it turns out not to have cost only time.

        Args:
            meta: The groups; those that were accumulated before are left alone.
            weight_version: Number of the weights that the step starts from.

        Raises:
            IncompleteBatchError: If the groups lack what the algorithm needs.
        """
        runner = self.runner
        assert isinstance(runner, StepRunner), "only the policy is trained early"
        if self._early[0] != weight_version:
            self._forget_early()
        samples = _samples_of(meta)
        new = [index for index, sample in enumerate(samples) if sample not in self._early[1]]
        if not new:
            return
        share = self._share(meta.select(new), weight_version, num_updates=1)
        if self._any_rank_has(nonfinite_inputs(share.samples, share.cohort)):
            return  # the step says so, and is skipped
        try:
            runner.accumulate(weight_version, share.samples, share.cohort, share.plan)
        except OomLimitError as error:
            self._forget_early()
            if self._spec.trainer.world_size > 1:
                raise
            logger.warning("groups wait for their step", extra={"error": str(error)})
            return
        except BaseException:
            self._forget_early()
            raise
        self._early = weight_version, self._early[1] | frozenset(samples)

    def _forget_early(self) -> None:
        if isinstance(self.runner, StepRunner):
            self.runner.forget()
        self._early = (-1, frozenset())
        if self._recorder is not None:
            self._recorder.forget()

    def _without_early(self, meta: KVBatchMeta, weight_version: int) -> KVBatchMeta:
        """What is left of a batch; everything, if what was accumulated is not a part of it."""
        samples, early = _samples_of(meta), self._early[1]
        if self._early[0] == weight_version and early < set(samples):
            return meta.select([i for i, sample in enumerate(samples) if sample not in early])
        self._forget_early()
        return meta

    def train(
        self,
        step: int,
        meta: KVBatchMeta,
        *,
        weight_version: int | None = None,
        num_steps: int | None = None,
    ) -> StepResult:
        """Train a batch. Blocks; runs in a thread.

        Args:
            step: Number of the step, from 1.
            meta: The whole batch.
            weight_version: Number of the weights that the step starts from; None counts them like steps.
            num_steps: Steps of the whole run; None leaves what is known of that.

        Raises:
            IncompleteBatchError: If the batch lacks what the algorithm needs.
            NotFiniteError: If too many steps in a row had to be skipped, even after going back.
            NotFoundError: If too many were skipped and there is no checkpoint to go back to.
        """
        version = step - 1 if weight_version is None else weight_version
        if num_steps is not None:
            self.runner.num_steps = num_steps
        left = self._without_early(meta, version)
        try:
            result = self._trained(step, left, version)
        except OomLimitError:
            if left is meta or self._spec.trainer.world_size > 1:
                raise
            # What was accumulated early is forgotten, so all of the step begins anew.
            result = self._trained(step, meta, version)
        if result.skipped:
            logger.error("step skipped", extra={"step": step, "keys": " ".join(meta.keys[:64])})
        seconds = sum(v for name, v in result.metrics.items() if name.startswith("seconds_"))
        result.metrics["seconds_total"] = seconds
        result.metrics["tokens_per_s"] = result.metrics.get("tokens", 0.0) / max(seconds, 1e-9)
        if self._guard.must_rewind(step, skipped=result.skipped):
            result.metrics["rewound_to_step"] = float(self.restore())
        return result

    def _trained(self, step: int, meta: KVBatchMeta, weight_version: int) -> StepResult:
        """Train a batch, or what is left of it."""
        timer = PhaseTimer()
        with timer("fetch"):
            share = self._share(
                meta, weight_version, num_updates=self._spec.trainer.updates_per_step
            )
        if self._any_rank_has(found := nonfinite_inputs(share.samples, share.cohort)):
            what = "reward" if "rewards" in found else "logprob"
            metrics = {"nonfinite_inputs": 1.0, f"nonfinite_{what}": 1.0}
            result = StepResult(metrics=metrics, skipped=True)
            self._forget_early()
        else:
            try:
                with self._profiler(step):
                    result = self.runner.run(
                        weight_version, share.samples, share.cohort, share.plan
                    )
            except BaseException:
                self._forget_early()
                raise
            self._early = (-1, frozenset())
            if self._recorder is not None:
                self._recorder.tell(meta.partition_id, step=step, weight_version=weight_version)
        result.metrics["seconds_fetch"] = timer.seconds["fetch"]
        return result

    def snapshot(self, step: int) -> Snapshot:
        """Copy the training state after a step, to be written while training goes on."""
        return self.checkpointer.snapshot(step, {"step": step, **self.runner.facts()})

    def restore(self, folder: Path | None = None) -> int:
        """Go back to a checkpoint, by default to the run's newest whole one; returns its step.

        Raises:
            NotFoundError: If there is none.
            DataLossError: If ``folder`` is not whole.
        """
        facts = self.checkpointer.load(folder)
        self.runner.restore(facts)
        return int(facts["step"])

    def _share(self, meta: KVBatchMeta, weight_version: int, *, num_updates: int) -> "_Share":
        """Plan a batch and fetch this rank's samples; the ranks agree that all have theirs."""
        if self._recorder is not None:
            self._recorder.begin(meta)
        fields = wanted_fields(meta, self._spec)
        cohort = BatchFacts.from_meta(meta)
        own = shard_of(
            cohort,
            num_updates=num_updates,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            cost=self._cost,
            shares_prefixes=self._spec.shares_prefixes,
            keeps_groups=self._spec.algorithm.loss_kind.compares_members,
        )
        samples = empty_samples(fields)
        is_outdated = False
        with self._ranks.agreed("fetch its share of the batch"):
            if own.rows:
                fetched = self._fetch(meta.select(own.rows), fields)
                is_outdated = _is_outdated(fetched, weight_version)
                samples = build_samples(
                    fetched,
                    own.rows,
                    cohort,
                    spec=self._spec.algorithm,
                    weight_version=weight_version,
                )
        if self._any(is_outdated):
            samples = samples.without_tokens("proximal_logprobs")
        plan = plan_step(
            own,
            samples,
            ranks=self._ranks,
            shares_prefixes=self._spec.shares_prefixes,
            bounds=self.runner.oom_limits.bounds,
        )
        return _Share(cohort, plan, samples)

    def _any_rank_has(self, names: tuple[str, ...]) -> bool:
        if names:
            logger.error("inputs are not finite", extra={"inputs": " ".join(names)})
        return self._any(bool(names))

    def _any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank. Every rank calls it."""
        return bool(self._ranks.sum(torch.tensor([int(condition)])).item())


def _samples_of(meta: KVBatchMeta) -> list[_Sample]:
    return list(zip(meta.keys, meta.tags.get("attempt", meta.keys), strict=True))


def _is_outdated(fetched: Mapping[str, Jagged], weight_version: int) -> bool:
    """Whether proximal logprobs are those of other weights than the step starts from.

    That happens if the trainer went back to a checkpoint after they were computed; it computes its own then.
    """
    versions = fetched.get("proximal_version")
    return versions is not None and bool((versions.values != weight_version).any())
