"""Micro-batches that outgrow memory: divided, and a sequence that does so alone left out of its step.

A pass that failed may have added a part of its gradients, so all of its update begins anew, with other
micro-batches and with counts of what is left. Where several processes exchange in each pass nothing can begin
anew, because the others wait in the middle of theirs: there the step fails, and says what did not fit.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from services.common.errors import InternalError
from services.common.spec.run import RunSpec
from services.trainer.batch.plan import micro_batches
from services.trainer.batch.prefixes import joined
from services.trainer.batch.samples import Cohort, Samples, idle_samples, pack_samples
from services.trainer.model.compiling import parts_of
from services.trainer.model.parallel import begin_micro_batch
from services.trainer.model.policy import Critic, Policy

logger = logging.getLogger(__name__)

Micros = tuple[tuple[int, ...], ...]
"""Micro-batches of an update, each of positions in a rank's sequences."""
_T = TypeVar("_T")
_REMEDY = (
    "with several processes, or groups that were trained early, an update cannot go on without it; lower "
    "trainer.tokens_per_micro_batch or rollout.max_response_tokens, or set trainer.activation_checkpointing, "
    "trainer.activation_offloading or trainer.context_parallel"
)


class OutgrownError(InternalError):
    """A micro-batch does not fit into memory, and its update cannot begin anew."""

    reason = "OUT_OF_MEMORY"


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


class Fitting:
    """Begins updates of a policy or critic anew until all of their micro-batches fit.

    Args:
        module: Is trained.
        spec: The run.
        device: Of its passes.
    """

    def __init__(self, module: Policy | Critic, spec: RunSpec, *, device: torch.device) -> None:
        self._module = module
        self._spec = spec
        self._device = device
        can_recover = not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")
        self._can_begin_anew = spec.trainer.world_size == 1 and can_recover
        self._budget: int | None = None
        self.left_out: set[int] = set()
        """Positions of the sequences that the step leaves out."""
        self._num_divided = 0

    def begin(self) -> None:
        """A step begins."""
        self.left_out, self._num_divided = set(), 0

    def metrics(self) -> dict[str, float]:
        """Of the step."""
        return {
            "left_out_sequences": float(len(self.left_out)),
            "divided_micro_batches": float(self._num_divided),
        }

    def left_out_of(self, samples: Samples, cohort: Cohort) -> dict[str, int]:
        """Tokens that the step left out, by key of their sample."""
        found: dict[str, int] = {}
        for position in sorted(self.left_out):
            key = cohort.keys[int(samples.rows[position])]
            found[key] = found.get(key, 0) + _num_tokens(samples.select([position]))
        return found

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
            OutgrownError: If one does not fit, and the update cannot begin anew.
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
                raise OutgrownError(
                    f"a micro-batch of {told} does not fit into memory: {why}; {_REMEDY}"
                )
            logger.warning("micro-batch outgrew memory", extra={"holds": told, "why": why})
            work = self._smaller(samples, work, number)

    def _smaller(self, samples: Samples, work: Micros, number: int) -> Micros:
        micro = work[number]
        part = samples.select(micro)
        if len(self._cut(part, micro, 1)) == 1:
            self.left_out.update(micro)
            # A step without any work still has its one update.
            return (*work[:number], *work[number + 1 :]) or ((),)
        self._num_divided += 1
        self._budget = max(1, _num_tokens(part) // 2)
        while len(self._cut(part, micro, self._budget)) == 1:
            self._budget = max(1, self._budget // 2)
        # Others of its size would fail as well.
        return self._within_budget(samples, work)

    def _within_budget(self, samples: Samples, work: Micros) -> Micros:
        """Micro-batches that are known to be too large are divided before they fail."""
        if self._budget is None:
            return work
        cut = [self._cut(samples.select(micro), micro, self._budget) for micro in work if micro]
        return tuple(part for parts in cut for part in parts) or ((),)

    def _cut(self, part: Samples, micro: Sequence[int], budget: int) -> list[tuple[int, ...]]:
        sequences = joined(part.prompts.unbind(), part.responses.unbind())
        groups = None if part.groups is None else part.groups.tolist()
        cut = micro_batches(sequences, budget, shares=self._spec.shares_prefixes, groups=groups)
        return [tuple(micro[index] for index in indexes) for indexes in cut]

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


def _num_tokens(part: Samples) -> int:
    return int(part.prompts.lengths.sum() + part.responses.lengths.sum())


def _described(samples: Samples, micro: Sequence[int]) -> str:
    return f"{_num_tokens(samples.select(micro)):,} tokens in {len(micro)} sequence(s)"
