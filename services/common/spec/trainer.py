"""How the model is optimized, sharded and saved."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.spec.base import SpecPart


class OptimizerSpec(SpecPart):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate grows linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; ``linear`` and ``cosine`` end at 10 % of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class LoraSpec(SpecPart):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules that get an adapter."""
    sync: Literal["merged", "adapter"] = "merged"
    """What rollouts receive. ``merged``: all weights, adapters merged into them, each time. ``adapter``: all
    once, then adapters alone, which each rollout merges; a few per cent of the bytes and of the gather."""


class CheckpointSpec(SpecPart):
    """When a run is saved, and how much is kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    directory: str | None = None
    """Folder; default: ``checkpoints`` in the run's own folder."""
    start_from: str | None = None
    """Checkpoint folder of another run that this one goes on from, with its weights, optimizer and step
    number. ``POST /v1/runs/{run_id}/fork`` sets it."""


class TrainerSpec(SpecPart):
    """Batch, optimizer, precision and parallelism."""

    steps: int = Field(ge=1)
    """Optimizer batches of the whole run."""
    prompts_per_step: int = Field(ge=1)
    """Groups that form one batch."""
    updates_per_step: int = Field(1, ge=1)
    """Mini-batches, each with one optimizer update, that a batch is split into."""
    tokens_per_micro_batch: int = Field(16_384, ge=1)
    """Packed tokens of one forward pass."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation dtype; master weights are always float32."""
    world_size: int = Field(1, ge=1)
    """Trainer processes, one per GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share each layer."""
    zero_stage: Literal[1, 3] = 3
    """What the processes share out (arXiv:1910.02054): 3, weights, gradients and optimizer; 1, only the
    optimizer, so that weights and gradients are exchanged once per update and not in every micro-batch, for
    the memory of a whole model's weights and float32 gradients on each GPU."""
    activation_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    cpu_offload: bool = False
    """Whether parameters and optimizer state live in host memory between uses."""
    compile: bool = False
    """Whether torch.compile is applied to the decoder layers."""
    lora: LoraSpec | None = None
    """Low-rank adapters instead of full fine-tuning."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the run is saved."""

    @model_validator(mode="after")
    def _offloaded_weights_are_not_kept(self) -> Self:
        if self.zero_stage == 1 and self.cpu_offload:
            raise ValueError(
                "trainer.zero_stage 1 keeps whole weights on the GPU, which trainer.cpu_offload moves away; "
                "set trainer.zero_stage to 3 or trainer.cpu_offload to false"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_not_divided(self) -> Self:
        if self.lora is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"trainer.lora cannot be combined with trainer.tensor_parallel {self.tensor_parallel}; "
                "set trainer.tensor_parallel to 1 and shard over more data-parallel ranks"
            )
        return self
