"""Gradients of the policy's updates: forward pass, objective and backward pass of each micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.common.spec.run import RunSpec
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.collectives import Ranks, Tally
from services.trainer.model.parallel import begin_micro_batch
from services.trainer.model.policy import Policy
from services.trainer.steps.balancing import Balancer
from services.trainer.steps.fitting import Micros, fitting
from services.trainer.steps.objective import Objective

OnTrained = Callable[[Samples, Tensor], None]
"""Hears of each micro-batch with its logprobs ``[R]``, before they are updated."""


@dataclass(slots=True)
class Added:
    """What came with the gradients of an update."""

    loss: Tensor
    """This rank's share of the loss."""
    unit: Tensor
    """``[2]`` tokens and sequences that it was divided by."""
    counts: Tensor
    """``[2]`` those that train in the update so far, over all ranks."""
    tally: Tally = field(default_factory=Tally)
    work: Work = field(default_factory=Work)


class Gradients:
    """Adds up the gradients of updates.

    Args:
        policy: The policy, wrapped for its parallelism.
        objective: Its loss.
        balancer: Of its experts.
        spec: The run.
        ranks: Data-parallel ranks.
        device: Of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        *,
        balancer: Balancer,
        spec: RunSpec,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._policy = policy
        self._objective = objective
        self._balancer = balancer
        self._spec = spec
        self._ranks = ranks
        self._device = device
        self.on_trained: OnTrained | None = None

    def add(
        self,
        samples: Samples,
        work: Micros,
        *,
        before: Tensor,
        unit: Tensor | None,
        kl_coefficient: float,
    ) -> Added:
        """Add the gradients of micro-batches to those that are there.

        Args:
            samples: This rank's samples, with all columns that their loss needs.
            work: The micro-batches. All ranks have as many.
            before: ``[2]`` tokens and sequences of the update that were trained before.
            unit: ``[2]`` what their gradients were divided by; None if there are none.
            kl_coefficient: Weight of the penalty in the loss.
        """
        counts = before + num_counted(samples.counted, samples, work, self._ranks)
        found = Added(
            torch.zeros((), device=self._device), counts if unit is None else unit, counts
        )
        if unit is None:
            self._balancer.begin_update()
        denominators = self._objective.denominators(*found.unit.to(self._device).unbind())
        for number, micro in enumerate(work):
            begin_micro_batch(
                self._policy, is_last=number + 1 == len(work), spec=self._spec.trainer
            )
            part = samples.select(micro) if micro else idle_samples()
            with fitting(number):
                packed = pack_samples(
                    part, self._device, shares_prefixes=self._spec.shares_prefixes
                )
                logprobs, entropy = self._policy(packed)
                loss = self._objective(
                    logprobs,
                    entropy,
                    part.to(self._device),
                    denominators=denominators,
                    kl_coefficient=kl_coefficient,
                    tally=found.tally,
                )
                loss += self._balancer.loss(part, found.unit[0], found.tally)
                # Gradients are averaged over ranks, but the loss is a sum over them.
                (loss * self._ranks.size).backward()
            if micro and self.on_trained is not None:
                self.on_trained(part, logprobs)
            found.loss += loss.detach()
            found.work += packed.work
        return found


def num_counted(mask: Tensor, samples: Samples, work: Micros, ranks: Ranks) -> Tensor:
    """``[2]`` tokens of a mask, and sequences that have some, in some micro-batches, over all ranks."""
    own = [position for micro in work for position in micro]
    counts = samples.segments.count(mask)[own]
    return ranks.sum(torch.stack([counts.sum(), (counts > 0).sum()]))
