"""When and how the policy is evaluated on held-out prompts."""

from typing import Literal

from pydantic import Field

from services.common.spec.base import SpecPart


class ValidationSpec(SpecPart):
    """Evaluation of one pinned weight version, beside training."""

    every: int = Field(10, ge=0)
    """Weight versions between evaluations; 0 evaluates at the end only (``at_end``)."""
    before_train: bool | None = None
    """Whether the initial weights are evaluated; null: if ``every`` is above 0."""
    at_end: bool = True
    """Whether the final weights are evaluated."""
    only: bool = False
    """Whether the run ends after the first evaluation."""
    mode: Literal["overlap", "barrier"] = "overlap"
    """Whether training goes on meanwhile."""
    replicas: int = Field(0, ge=0)
    """Rollouts that are lent to an evaluation: they keep its weights until it is done, while the others, and
    training, go on. 0 evaluates on all of them, and new weights wait until the last response is there."""
    samples_per_prompt: int = Field(1, ge=1)
    """Sampled responses per held-out prompt, besides a greedy one."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled responses."""
    solved_from: float = 1.0
    """Reward from which a response counts as right, for ``pass@k``."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one evaluation; past it, what was scored is reported with status ``timeout``."""

    @property
    def begins(self) -> bool:
        """Whether the initial weights are evaluated."""
        return self.only or (self.every > 0 if self.before_train is None else self.before_train)
