"""How the model is optimized, sharded and saved."""

from typing import Annotated, Literal

from pydantic import Field

from services.common.runspec.base import SpecPart

OF_EXPERTS = "experts."
"""What names of the fused matrices of a layer's experts have in them."""


class OptimizerSpec(SpecPart):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices, embeddings included; norms, biases and other vectors have none."""
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
    """Modules that get an adapter. The experts of a mixture are ``experts.gate_up_proj`` and
    ``experts.down_proj``: each of a layer's has one of its own."""
    sync: Literal["auto", "merged", "adapter"] = "auto"
    """What rollouts receive. ``adapter``: adapters alone; each rollout reads the frozen weights from
    ``model.path`` into host memory, checks that they are the trainer's, and merges. No GPU then holds a copy
    of the weights for their way. ``merged``: all weights, adapters merged into them. ``auto`` takes
    ``adapter`` unless the model is a preset, which has no folder, experts have adapters, ``logp`` has GPUs of
    its own, or ``weight_sync.mode`` is ``inplace``."""

    @property
    def adapts_experts(self) -> bool:
        """Whether experts of a mixture are among the targets."""
        return any(OF_EXPERTS in target for target in self.target_modules)


class CriticSpec(SpecPart):
    """How the critic of GAE is trained; what is not said here is as for the policy."""

    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; null is that of the policy. Critics are usually given more."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which the critic alone is trained: advantages of an untrained critic only disturb."""


class BalancingSpec(SpecPart):
    """How the choice of a mixture's experts is kept even."""

    kind: Literal["none", "loss", "bias"] = "none"
    """``loss``: the auxiliary loss of Qwen's, Mixtral's and gpt-oss's own training. ``bias``: experts that
    are chosen less get a bias in the choice, as in DeepSeek-V3 and GLM-4.5 (``e_score_correction_bias``)."""
    coefficient: float | None = Field(None, gt=0)
    """Factor of the loss; null is ``router_aux_loss_coef`` of the model."""
    bias_rate: float = Field(1e-3, gt=0)
    """By how much a bias moves in an update."""


class BestSpec(SpecPart):
    """By which held-out score the best checkpoint is known."""

    set: str | None = None
    """Name of a set of ``data.heldout``; null is the only one, or the mean over the prompts of all."""
    metric: str = Field("greedy", pattern=r"^(greedy|sampled|best|maj|pass@[1-9][0-9]*|reward/.+)$")
    """Its score: ``greedy``, ``sampled``, ``best``, ``maj``, ``pass@K``, ``reward/TERM``; highest is best."""


class CheckpointSpec(SpecPart):
    """When a run is saved, and how much is kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves by time (``every_s``). The last step is always saved."""
    every_s: float = Field(600.0, ge=0)
    """Seconds between checkpoints if ``every`` is 0: the first step that ends later is saved. 0 saves only at
    the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    best: BestSpec | None = None
    """Which one is kept besides: that of the highest held-out score. null keeps the newest alone."""
    directory: str | None = None
    """Folder; default: ``checkpoints`` in the run's own folder."""
    start_from: str | None = None
    """Checkpoint folder of another run that this one starts from: its weights, optimizer and step number.
    ``trainer.steps`` counts the steps of the checkpoint; prompts begin with the first one. ``POST
    /v1/runs/{run_id}/fork`` sets it, and goes on with the prompts of the other run too."""


class TrainerSpec(SpecPart):
    """Batch, optimizer, precision and parallelism."""

    steps: int | None = Field(None, ge=1)
    """Optimizer batches of the whole run; null if ``data.epochs`` says how long it is."""
    prompts_per_step: int = Field(ge=1)
    """Groups that form one batch."""
    updates_per_step: int = Field(1, ge=1)
    """Mini-batches, each with one optimizer update, that a batch is split into."""
    accumulate_early: bool = False
    """Whether groups of a synchronous step are trained as they finish, while others of it are generated
    (arXiv:2511.18871): their gradients are added up, and one update follows when all are in. It is that of
    the whole batch, exactly on-policy."""
    tokens_per_micro_batch: int = Field(16_384, ge=1)
    """Packed tokens of one forward pass, on each of the processes that share them."""
    share_prefixes: bool = True
    """Whether tokens that samples of a micro-batch have in common from their beginnings on, such as the
    prompt of a group, are computed once. Logprobs and gradients stay what they are without."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation dtype. Weights that are trained are float32 always; frozen ones, which ``lora`` and a
    reference have, are in this dtype."""
    world_size: int = Field(1, ge=1)
    """Trainer processes, one per GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share each layer."""
    expert_parallel: int = Field(1, ge=1)
    """Data-parallel processes that share the experts of each layer: tokens travel to those that hold their
    experts, and back. Divides the data-parallel processes and the experts of a layer."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share the tokens of each micro-batch, and in attention its heads (arXiv:2309.14509): a
    sequence may be as many times longer. Divides the processes and the attention heads of each."""
    balancing: BalancingSpec = BalancingSpec()
    """How the choice of a mixture's experts is kept even."""
    zero_stage: Literal[1, 3] = 3
    """What the processes share out (arXiv:1910.02054): 3, weights, gradients and optimizer; 1, only the
    optimizer, so that weights and gradients are exchanged once per update and not in every micro-batch, for
    the memory of a whole model's weights and float32 gradients on each GPU."""
    activation_checkpointing: bool | Literal["auto", "selective"] | Annotated[int, Field(ge=2)] = (
        "auto"
    )
    """What layers compute again in the backward pass instead of keeping it: true, all but their inputs, for a
    third more operations; a number ``n``, the same in every ``n``-th layer; ``selective``, what costs little,
    keeping matrix products and attention; ``auto``, the least of false, ``selective`` and true with which the
    run fits on its GPUs."""
    activation_offloading: bool = False
    """Whether what layers keep for the backward pass waits in host memory. Copies run beside computation, and
    take no time of their own where layers keep little (``activation_checkpointing: true``)."""
    cpu_offload: bool | Literal["optimizer"] = False
    """What lives in host memory between uses: true, weights, gradients and optimizer, which computes there;
    ``optimizer``, its moments alone, which visit the GPU for an update."""
    compile: bool = False
    """Whether torch.compile is applied to the decoder layers, while engines start. A step's ``compilations``
    are those that it had to wait for all the same; there should be none."""
    lora: LoraSpec | None = None
    """Low-rank adapters instead of full fine-tuning."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the run is saved."""
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of which each trainer process writes a profile for Perfetto or chrome://tracing,
    ``profiles/step-<step>-rank-<rank>.json.gz`` in the run's folder. They take longer than others; the first
    also has what only a first step has."""

    @property
    def offloads_weights(self) -> bool:
        """Whether weights and gradients are in host memory."""
        return self.cpu_offload is True
