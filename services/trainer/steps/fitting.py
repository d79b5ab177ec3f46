"""Micro-batches that outgrow memory: divided, and a sequence that does so alone left out of its step.

A pass that failed may have added a part of its gradients, so all of its update begins anew, with other
micro-batches and with counts of what is left. Where several processes exchange in each pass nothing can begin
anew, because the others wait in the middle of theirs: there all start again, and plan for what did not fit.
"""

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from services.common.spec.run import RunSpec
from services.trainer.batch.plan import Bounds, bounds_of, cut, num_tokens
from services.trainer.batch.samples import Cohort, Samples, idle_samples, pack_samples
from services.trainer.collectives import Ranks
from services.trainer.model.compiling import parts_of
from services.trainer.model.parallel import begin_micro_batch
from services.trainer.model.policy import Critic, Policy
from services.trainer.steps.outgrown import Outgrown, OutgrownError

logger = logging.getLogger(__name__)

Micros = tuple[tuple[int, ...], ...]
"""Micro-batches of an update, each of positions in a rank's sequences."""
_T = TypeVar("_T")


class _TooLargeError(Exception):
    """A micro-batch, by its number, does not fit."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


@contextmanager
def fitting(number: int) -> Iterator[None]:
    """Around the passes of a micro-batch, by its number in the update."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _TooLargeError(number, str(error).partition("\n")[0]) from None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a step left out."""

    num_sequences: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    """By key of their sample."""

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.num_sequences + other.num_sequences, {**self.tokens, **other.tokens})


class Fitting:
    """Begins updates of a policy or critic anew until all of their micro-batches fit.

    Args:
        module: Is trained.
        spec: The run.
        device: Of its passes.
        outgrown: What did not fit before.
    """

    def __init__(
        self,
        module: Policy | Critic,
        spec: RunSpec,
        *,
        device: torch.device,
        outgrown: Outgrown,
    ) -> None:
        self._module = module
        self._spec = spec
        self._device = device
        can_recover = not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")
        self._can_begin_anew = spec.trainer.world_size == 1 and can_recover
        self._outgrown = outgrown
        self.left_out: set[int] = set()
        """Positions of the sequences that the step leaves out."""
        self._num_divided = 0

    def begin(self, left_out: Collection[int] = ()) -> None:
        """A step begins, or a part of it, for which its plan leaves some sequences out."""
        self.left_out, self._num_divided = set(left_out), 0

    def metrics(self) -> dict[str, float]:
        """Of the step."""
        return {"divided_micro_batches": float(self._num_divided)}

    def left_out_of(self, samples: Samples, cohort: Cohort, ranks: Ranks) -> LeftOut:
        """What the step left out on all ranks, each of which calls it."""
        counts = torch.zeros(len(cohort.keys), 2, dtype=torch.int64)
        for position in self.left_out:
            tokens = num_tokens(samples.select([position]))
            counts[int(samples.rows[position])] += torch.tensor([1, tokens])
        counts = ranks.sum(counts)
        tokens_of = dict(zip(cohort.keys, counts[:, 1].tolist(), strict=True))
        return LeftOut(
            int(counts[:, 0].sum()), {k: count for k, count in tokens_of.items() if count}
        )

    def kept(self, samples: Samples) -> Samples:
        """Samples whose loss has no token that the step left out."""
        trains = torch.ones(len(samples.rows), dtype=torch.bool)
        trains[list(self.left_out)] = False
        mask = samples.tokens["loss_mask"] & samples.segments.spread(trains)
        return samples.with_tokens(loss_mask=mask)

    def fitted(
        self, attempt: Callable[[Micros], _T], samples: Samples, work: Micros, *, once: bool = False
    ) -> tuple[_T, Micros]:
        """Add up an update's gradients; returns what ``attempt`` does, and the work that it did.

        Args:
            attempt: Adds up the gradients of some micro-batches, each of them inside of :func:`fitting`.
            samples: What positions are of.
            work: The micro-batches, as planned.
            once: Whether other gradients are there already, which would be lost.

        Raises:
            OutgrownError: If one does not fit, and neither the update nor the process can begin anew.
        """
        work = self._within_budget(samples, work)
        while True:
            try:
                return attempt(work), work
            except _TooLargeError as error:
                number, why = error.number, str(error)
            # The error is forgotten by now, and with it all that its frames held.
            self._recover()
            told = _described(samples, work[number])
            if once or not self._can_begin_anew or not work[number]:
                if work[number]:
                    self._outgrown.give_up(self._bounds(samples, work[number]), told, why)
                raise OutgrownError(told, why)
            logger.warning("micro-batch outgrew memory", extra={"holds": told, "why": why})
            work = self._smaller(samples, work, number)

    def _smaller(self, samples: Samples, work: Micros, number: int) -> Micros:
        micro = work[number]
        bounds = self._bounds(samples, micro)
        if bounds.max_tokens == Bounds().max_tokens:
            self.left_out.update(micro)
            # A step without any work still has its one update.
            return (*work[:number], *work[number + 1 :]) or ((),)
        self._num_divided += 1
        self._outgrown.learn(bounds)
        # Others of its size would fail as well.
        return self._within_budget(samples, work)

    def _bounds(self, samples: Samples, micro: Sequence[int]) -> Bounds:
        return bounds_of(samples.select(micro), shares=self._spec.shares_prefixes)

    def _within_budget(self, samples: Samples, work: Micros) -> Micros:
        """Micro-batches that are known to be too large are divided before they fail."""
        if not self._outgrown.has_learned:
            return work
        most, shares = self._outgrown.bounds.max_tokens, self._spec.shares_prefixes
        parts = (
            part
            for micro in work
            if micro
            for part in cut(samples, micro, max_tokens=most, shares=shares)
        )
        return tuple(parts) or ((),)

    def _recover(self) -> None:
        """Forget the passes that broke, and all gradients of the update."""
        self._module.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(self._module, FSDPModule) and self._can_begin_anew:
            root: Any = self._module
            root.reset_iter_state()
            # It has gradients that wait for an update's last micro-batch: here it is, without a token.
            begin_micro_batch(root, is_last=True, spec=self._spec.trainer)
            scores = root(pack_samples(idle_samples(), self._device, shares_prefixes=False))
            torch.stack([each.sum() for each in parts_of(scores)]).sum().backward()
            self._module.zero_grad(set_to_none=True)


def _described(samples: Samples, micro: Sequence[int]) -> str:
    return f"{num_tokens(samples.select(micro)):,} tokens in {len(micro)} sequence(s)"
