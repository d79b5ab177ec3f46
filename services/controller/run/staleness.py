"""Bounded staleness: when a group may start, and which must be trained now. Pure.

Source of the admission rule: AReaL (arXiv:2505.24298), ``N + 1 <= (v + max_staleness + 1) * B``. It bounds
what is admitted; a long response can still grow older, so batches are checked again when they are formed.
"""

import math
from dataclasses import dataclass

# Products of fractions are a little off.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """The bound of one run."""

    max_staleness: float
    """Most weight versions a sample may lag behind when it is trained. With a fraction, such as 0.5, half a
    batch is generated ahead; its samples lag one whole version behind."""
    groups_per_step: int
    """Groups in a batch."""

    def capacity(
        self, *, published: int, num_admitted: int, num_running: int, max_running: int
    ) -> int:
        """Groups that may start now; not negative.

        Args:
            published: Newest weight version that the rollouts serve.
            num_admitted: Groups admitted so far and not taken back: running, waiting and trained.
            num_running: Those of them that are being generated.
            max_running: Most that may be generated at once.
        """
        most = (published + self.max_staleness + 1) * self.groups_per_step
        room = math.floor(most + _SLACK) - num_admitted
        return max(0, min(room, max_running - num_running))

    def may_generate_step(self, step: int, *, published: int) -> bool:
        """Whether samples for ``step`` (from 1) may be generated: dots.rl's generate-ahead gate."""
        return step - 1 - published <= self.max_staleness

    def is_stale(self, oldest_version: int, *, trainer_version: int) -> bool:
        """Whether a sample may no longer be trained by the trainer as it is now."""
        return trainer_version - oldest_version > math.ceil(self.max_staleness)

    def is_due(self, oldest_version: int, *, trainer_version: int) -> bool:
        """Whether a sample must be in the next batch, because it would be stale in the one after it."""
        return trainer_version - oldest_version >= math.ceil(self.max_staleness)

    def is_at_risk(self, oldest_version: int, weight_version: int) -> bool:
        """Whether an unfinished sample would be due after one more version."""
        return weight_version - oldest_version >= math.ceil(self.max_staleness) - 1
