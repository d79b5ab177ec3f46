"""Detects numbers that are not finite before they reach the weights, and limits skipped steps."""

from dataclasses import dataclass

import torch

from services.common.errors import InternalError
from services.trainer.batch.samples import BatchFacts, Samples

_CHECKED_COLUMNS = ("rollout_logprobs", "ref_logprobs", "proximal_logprobs", "values")


class NotFiniteError(InternalError):
    """Too many consecutive steps had a number that is not finite."""

    reason = "NOT_FINITE"


@dataclass(slots=True)
class NonFiniteGuard:
    """Limits the number of consecutive skipped steps.

    Args:
        suspects: Likely causes besides the learning rate and rewards, for the message.
    """

    max_skipped: int
    suspects: tuple[str, ...] = ()
    num_skipped: int = 0
    has_rewound: bool = False

    def must_rewind(self, step: int, *, skipped: bool) -> bool:
        """Counts a step; returns True if too many were skipped, so that a checkpoint must be restored.

        Raises:
            NotFiniteError: If going back to the newest checkpoint did not help before.
        """
        if not skipped:
            self.num_skipped, self.has_rewound = 0, False
            return False
        self.num_skipped += 1
        if self.num_skipped <= self.max_skipped:
            return False
        if self.has_rewound:
            raise NotFiniteError(
                f"step {step} has a number that is not finite, like all steps since the newest checkpoint "
                "was loaded; lower trainer.optimizer.learning_rate, or check "
                f"{' and '.join((*self.suspects, 'the rewards'))}",
                step=step,
            )
        self.num_skipped, self.has_rewound = 0, True
        return True


def nonfinite_inputs(samples: Samples, cohort: BatchFacts) -> tuple[str, ...]:
    """Returns the names of inputs that are not finite where they count: ``rewards`` and columns."""
    member = cohort.is_member[samples.rows]
    # A greedy response is not a member of its group, but the baseline of the members.
    rewarded = member | cohort.is_greedy[samples.rows]
    found = [] if bool(torch.isfinite(samples.rewards[rewarded]).all()) else ["rewards"]
    # Untrained tokens may count too, in the rewards that others train with.
    mask = samples.tokens["response_mask"] & samples.segments.expand(member)
    found += [
        name
        for name in _CHECKED_COLUMNS
        if name in samples.tokens and not bool(torch.isfinite(samples.tokens[name][mask]).all())
    ]
    return tuple(found)
