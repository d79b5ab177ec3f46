"""Bounded staleness: when a group may start, and which must be trained now. Pure.

Source of the admission rule: AReaL (arXiv:2505.24298), ``N + 1 <= (v + max_staleness + 1) * B``. It bounds
what is admitted; a long response can still grow older, so batches are checked again when they are formed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """The bound of one run."""

    max_staleness: int
    """Most weight versions a sample may lag behind when it is trained."""
    groups_per_step: int
    """Groups in a batch."""

    def capacity(self, *, published: int, num_admitted: int, most: int) -> int:
        """Groups that may start now; not negative.

        Args:
            published: Newest weight version that the rollouts serve.
            num_admitted: Groups admitted so far and not taken back: running, waiting and trained.
            most: Groups that the rollouts have room for.
        """
        bound = (published + self.max_staleness + 1) * self.groups_per_step
        return max(0, min(bound - num_admitted, most))

    def is_stale(self, oldest_version: int, *, trainer_version: int) -> bool:
        """Whether a sample may no longer be trained by the trainer as it is now."""
        return trainer_version - oldest_version > self.max_staleness

    def batches_left(self, oldest_version: int, *, trainer_version: int) -> int:
        """Batches behind the next one that may still have a sample; 0 if the next one must."""
        return max(0, oldest_version + self.max_staleness - trainer_version)

    def is_at_risk(self, oldest_version: int, weight_version: int) -> bool:
        """Whether an unfinished sample would be due after one more version."""
        return weight_version - oldest_version >= self.max_staleness - 1
