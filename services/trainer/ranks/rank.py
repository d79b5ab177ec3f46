"""What one trainer process does with a batch: its share of the plan, fetched and trained."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from services.common.batch import KVBatchMeta
from services.common.jagged import Jagged
from services.common.spec.run import RunSpec
from services.trainer.batch.guard import NonFiniteGuard, nonfinite_inputs
from services.trainer.batch.plan import StepPlan, plan_step
from services.trainer.batch.samples import (
    Cohort,
    Samples,
    build_samples,
    empty_samples,
    wanted_fields,
)
from services.trainer.checkpoint.checkpointer import Checkpointer, Snapshot
from services.trainer.phases import PhaseTimer
from services.trainer.ranks.collectives import Ranks
from services.trainer.ranks.transfers import Fetch
from services.trainer.step import StepResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Trains something: the policy, or the critic where it has processes of its own."""

    def run(
        self, weight_version: int, samples: Samples, cohort: Cohort, plan: StepPlan
    ) -> StepResult:
        """Train one batch."""

    def parts(self) -> dict[str, tuple[nn.Module, torch.optim.AdamW]]:
        """What is trained, with its optimizer, by the prefix of its names."""

    def facts(self) -> dict[str, float]:
        """Numbers that a checkpoint keeps besides the tensors."""

    def restore(self, facts: Mapping[str, float]) -> None:
        """Continue from the numbers of a checkpoint."""


class Rank:
    """One rank's part in training. Every rank must be asked the same, in the same order.

    Args:
        runner: Trains.
        fetch: Brings samples from the transferqueue.
        spec: The run.
        ranks: Data-parallel ranks.
        cost: Cost of a sequence by its length, for balancing.
        checkpointer: Saves and loads what is trained.
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
    ) -> None:
        self.runner = runner
        self.checkpointer = checkpointer
        self._fetch = fetch
        self._spec = spec
        self._ranks = ranks
        self._cost = cost
        self._guard = NonFiniteGuard(spec.algorithm.max_nonfinite_steps)

    def train(
        self, step: int, meta: KVBatchMeta, *, weight_version: int | None = None
    ) -> StepResult:
        """Train a batch. Blocks; runs in a thread.

        Args:
            step: Number of the step, from 1.
            meta: The whole batch.
            weight_version: Number of the weights that the step starts from; None counts them like steps.

        Raises:
            IncompleteBatchError: If the batch lacks what the algorithm needs.
            NotFiniteError: If too many steps in a row had to be skipped, even after going back.
            NotFoundError: If too many were skipped and there is no checkpoint to go back to.
        """
        version = step - 1 if weight_version is None else weight_version
        timer = PhaseTimer()
        fields = wanted_fields(meta, self._spec)
        cohort = Cohort.from_meta(meta)
        plan = plan_step(
            cohort,
            num_updates=self._spec.trainer.updates_per_step,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            max_tokens=self._spec.trainer.tokens_per_micro_batch,
            cost=self._cost,
        )
        with timer("fetch"):
            samples = self._fetch_share(version, meta, fields, cohort, plan)
        if self._any_rank_has(found := nonfinite_inputs(samples, cohort)):
            what = "reward" if "rewards" in found else "logprob"
            metrics = {"nonfinite_inputs": 1.0, f"nonfinite_{what}": 1.0}
            result = StepResult(metrics=metrics, skipped=True)
        else:
            result = self.runner.run(version, samples, cohort, plan)
        if result.skipped:
            logger.error("step skipped", extra={"step": step, "keys": " ".join(meta.keys[:64])})
        result.metrics["seconds_fetch"] = timer.seconds["fetch"]
        seconds = sum(v for name, v in result.metrics.items() if name.startswith("seconds_"))
        result.metrics["seconds_total"] = seconds
        result.metrics["tokens_per_s"] = result.metrics.get("tokens", 0.0) / max(seconds, 1e-9)
        if self._guard.must_rewind(step, skipped=result.skipped):
            result.metrics["rewound_to_step"] = float(self.restore())
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

    def _fetch_share(
        self,
        weight_version: int,
        meta: KVBatchMeta,
        fields: Sequence[str],
        cohort: Cohort,
        plan: StepPlan,
    ) -> Samples:
        """Fetch this rank's samples, and agree with the others that all have theirs."""
        samples = empty_samples(fields)
        is_outdated = False
        with self._ranks.agreed("fetch its share of the batch"):
            if plan.rows:
                fetched = self._fetch(meta.select(plan.rows), fields)
                is_outdated = _is_outdated(fetched, weight_version)
                samples = build_samples(
                    fetched,
                    plan.rows,
                    cohort,
                    spec=self._spec.algorithm,
                    weight_version=weight_version,
                )
        return samples.without_tokens("proximal_logprobs") if self._any(is_outdated) else samples

    def _any_rank_has(self, names: tuple[str, ...]) -> bool:
        if names:
            logger.error("inputs are not finite", extra={"inputs": " ".join(names)})
        return self._any(bool(names))

    def _any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank. Every rank calls it."""
        return bool(self._ranks.sum(torch.tensor([int(condition)])).item())


def _is_outdated(fetched: Mapping[str, Jagged], weight_version: int) -> bool:
    """Whether proximal logprobs are those of other weights than the step starts from.

    That happens if the trainer went back to a checkpoint after they were computed; it computes its own then.
    """
    versions = fetched.get("proximal_version")
    return versions is not None and bool((versions.values != weight_version).any())
