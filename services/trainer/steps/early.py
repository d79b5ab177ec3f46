"""What a step has before all of its groups are there."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.trainer.batch.packing import Work
from services.trainer.batch.samples import Cohort, Samples
from services.trainer.collectives import Tally
from services.trainer.model.compiling import num_compiled
from services.trainer.phases import PhaseTimer
from services.trainer.steps.fitting import LeftOut


@dataclass(slots=True)
class Early:
    """Of the groups so far: what is reported, and what their gradients were divided by."""

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    tally: Tally = field(default_factory=Tally)
    unit: Tensor | None = None
    """``[2]`` tokens and sequences that the gradients were divided by; None before the first group. Those of
    the whole update are known at its end only."""
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    """``[2]`` tokens and sequences that train, over all ranks."""
    loss: Tensor | float = 0.0
    """This rank's share of the loss."""
    sizes: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """``[4]`` samples, tokens, response tokens and trained tokens of this rank."""
    num_samples: int = 0
    """Samples of all ranks."""
    work: Work = field(default_factory=Work)
    """What this rank's forward and backward passes took."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """What did not fit into memory, on all ranks."""
    seconds: float = 0.0
    """Time that they took."""
    compiled_before: int = field(default_factory=num_compiled)

    def add(self, samples: Samples, cohort: Cohort, *, seconds: float) -> None:
        """Count samples of this rank, and of ``cohort`` over all ranks."""
        prompts, responses = samples.prompts.values, samples.responses.values
        trained = int(samples.tokens["loss_mask"].sum())
        self.sizes += torch.tensor(
            [
                int(samples.is_first.sum()),
                len(prompts) + len(responses),
                len(responses),
                trained,
            ]
        )
        self.num_samples += len(cohort.lengths)
        self.seconds += seconds
