"""Which samples of a run are kept, so that people can read what the model wrote."""

import hashlib

from pydantic import Field

from services.common.spec.base import SpecPart


class SamplesSpec(SpecPart):
    """Retention of the samples that are kept with their texts, beside what training needs."""

    groups_per_step: float = Field(8, ge=0)
    """Groups of a step that are kept, on average: which ones follows from their names. 0 keeps none."""
    heldout_prompts: int = Field(32, ge=0)
    """Held-out prompts whose samples are kept, about; the same ones in every evaluation. 0 keeps none."""
    max_steps: int = Field(0, ge=0)
    """Newest steps whose samples stay; 0 leaves that to ``max_bytes``."""
    max_bytes: int = Field(256 << 20, ge=1 << 20)
    """Bytes that they may take on the transferqueue's disk; the oldest go first."""

    def keeps_group(self, group_id: str, *, prompts_per_step: int) -> bool:
        """Whether the samples of a group are kept: every process draws the same ones.

        Args:
            group_id: The group.
            prompts_per_step: Groups that a step trains.
        """
        return _is_drawn(group_id, self.groups_per_step / prompts_per_step)

    def keeps_prompt(self, row: int, *, num_prompts: int) -> bool:
        """Whether the samples of a held-out prompt are kept, in every evaluation.

        Args:
            row: The prompt.
            num_prompts: Held-out prompts of the run.
        """
        return _is_drawn(f"row {row}", self.heldout_prompts / max(num_prompts, 1))

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.groups_per_step > 0 or self.heldout_prompts > 0


def _is_drawn(name: str, fraction: float) -> bool:
    """Whether a name is among that fraction of all names."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
