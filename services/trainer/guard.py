"""Numbers that are not finite: found before they spoil the weights, counted, and bounded."""

from dataclasses import dataclass

import torch

from services.common.errors import InternalError
from services.trainer.samples import Cohort, Samples

_CHECKED_COLUMNS = ("rollout_logprobs", "ref_logprobs", "proximal_logprobs")


class NotFiniteError(InternalError):
    """Too many steps in a row had a number that is not finite."""

    reason = "NOT_FINITE"


@dataclass(slots=True)
class NonFiniteGuard:
    """Ends a run whose steps keep being skipped.

    Args:
        max_in_a_row: Steps that may be skipped one after the other.
    """

    max_in_a_row: int
    in_a_row: int = 0

    def observe(self, step: int, *, skipped: bool) -> None:
        """Count a step.

        Raises:
            NotFiniteError: If one step too many was skipped.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row > self.max_in_a_row:
            raise NotFiniteError(
                f"step {step} is the {self.in_a_row}th in a row with a number that is not finite; "
                "lower trainer.optimizer.learning_rate or look for a faulty reward, then resume from "
                "the newest checkpoint",
                step=step,
            )


def nonfinite_inputs(samples: Samples, cohort: Cohort) -> tuple[str, ...]:
    """Names of the inputs that are not finite where they count: ``rewards`` and columns."""
    member = cohort.is_member[samples.rows]
    found = [] if bool(torch.isfinite(samples.rewards[member]).all()) else ["rewards"]
    mask = samples.tokens["loss_mask"]
    found += [
        name
        for name in _CHECKED_COLUMNS
        if name in samples.tokens and not bool(torch.isfinite(samples.tokens[name][mask]).all())
    ]
    return tuple(found)
