"""RunSpec: the one description of a run."""

from typing import Self

from pydantic import Field, model_validator

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.base import SpecPart
from services.common.spec.data import DataSpec
from services.common.spec.limits import LimitsSpec
from services.common.spec.model import ModelSpec
from services.common.spec.rollout import RolloutSpec
from services.common.spec.trainer import TrainerSpec
from services.common.spec.transferqueue import TransferQueueSpec
from services.common.spec.validation import ValidationSpec
from services.common.spec.weight_sync import WeightSyncSpec


class RunSpec(SpecPart):
    """What to train. Written by the user, resolved once, then the same for every process."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Name of the run: a DNS label."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and initial weights."""
    model: ModelSpec
    """The policy that is trained."""
    data: DataSpec
    """Prompts."""
    rollout: RolloutSpec
    """Generation and rewards."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Loss, advantage, correction, staleness."""
    trainer: TrainerSpec
    """Optimization."""
    validation: ValidationSpec = ValidationSpec()
    """Evaluation on held-out prompts."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """The weight plane."""
    transferqueue: TransferQueueSpec = TransferQueueSpec()
    """The data plane."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and restarts."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        sampling = self.rollout.sampling
        if sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0 (greedy), so all members of a group would be equal; "
                "training needs a temperature above 0"
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                "rollout.sampling.top_p must be 1 and top_k 0 for training, because the trainer's "
                f"logprobs cover all tokens, but they are {sampling.top_p} and {sampling.top_k}"
            )
        if self.trainer.updates_per_step > self.trainer.prompts_per_step:
            raise ValueError(
                f"trainer.updates_per_step ({self.trainer.updates_per_step}) must not exceed "
                f"trainer.prompts_per_step ({self.trainer.prompts_per_step}): each mini-batch needs a group"
            )
        group_size, least = self.rollout.group_size, self.algorithm.min_group_size
        if group_size < least:
            raise ValueError(
                f"rollout.group_size ({group_size}) is below algorithm.min_group_size ({least}), so no "
                "group could ever be trained; raise the first or lower the second"
            )
        if self.trainer.world_size % self.trainer.tensor_parallel:
            raise ValueError(
                f"trainer.world_size ({self.trainer.world_size}) must be a multiple of "
                f"trainer.tensor_parallel ({self.trainer.tensor_parallel})"
            )
        if self.validation.only and self.data.heldout is None:
            raise ValueError("validation.only needs data.heldout; name the held-out prompts")
        return self
