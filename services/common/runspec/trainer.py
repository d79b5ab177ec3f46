"""Optimization, sharding and checkpoints of the trainer."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from services.common.doors import Door, References
from services.common.runspec.base import MAX_SECONDS, NameIn, SpecPart
from services.common.runspec.engines import TRAIN_ENGINES
from services.common.stores import is_url, plain_path

OF_EXPERTS = "experts."
"""Substring of the names of a layer's fused expert matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer by the name of its entry point in the group ``slipstream.optimizers``."""

    make: str
    """Reference ``module:function`` of a function of parameter groups that returns a
    ``torch.optim.Optimizer``. It has the keywords ``lr``, ``betas`` and those of ``options``. The trainer
    sets each group's ``lr`` before an update, and saves and loads the states of parameters, which must exist
    once it is made: tensors of the parameter's sharding, and ``step``, a float32 scalar, which is not saved
    but set to the number of updates."""
    options: tuple[str, ...] = ()
    """Keys of ``trainer.optimizer`` that it takes besides."""
    marks_matrices: bool = False
    """True if matrices of layers are separate groups, in which ``takes_muon`` is true."""
    takes_parts: bool = False
    """True if it updates adapters and parts of layers (``trainer.lora``, ``trainer.tensor_parallel``)."""
    state_bytes: str = ""
    """Reference of a function that takes the shapes of a model's weights by name and returns the bytes of
    its states; empty for two float32 values of each weight."""
    working_bytes: float = 0.0
    """Bytes on the GPU besides states during an update."""


OPTIMIZERS: Final = Door("optimizers", OptimizerKind)
"""Optimizers by the value of ``trainer.optimizer.kind``."""

HOST_OPTIMIZERS: Final = References("host_optimizers")
"""``OptimizerKind.make`` with states in host memory (``trainer.cpu_offload``), by the same value."""

ADAMW: Final = OptimizerKind(
    make="services.trainer.engines.fsdp.optim:fused_adamw", takes_parts=True
)


def _normalized(path: str) -> str:
    """Removes what does not change a path or URL, as a slash at its end: paths are compared."""
    path = plain_path(path)
    return path.rstrip("/") if is_url(path) or not path else str(PurePath(path))


FolderPath = Annotated[str, AfterValidator(_normalized)]
"""Path of a folder, or its URL."""


class OptimizerSpec(SpecPart):
    """Optimizer and its learning-rate schedule."""

    kind: Annotated[str, NameIn(OPTIMIZERS)] = "adamw"
    """Optimizer, or that of an installed package. ``adamw_8bit``: moments of matrices in 8 bits, in blocks
    with a scale each (arXiv:2110.02861). ``muon``: Muon (arXiv:2502.16982) for the matrices of layers, with
    updates scaled to those of AdamW, and AdamW for embeddings, output and value heads, fused experts and
    vectors."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices, including embeddings. Norms, biases and other vectors
    have none."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimizer steps over which the learning rate grows linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up; ``linear`` and ``cosine`` end at 10 % of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Max global norm of the gradients; larger gradients are scaled down to it."""


class LoraSpec(SpecPart):
    """Low-rank adapters, trained instead of the full weights."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters (the alpha of LoRA)."""
    target_modules: tuple[str, ...] | None = None
    """Modules that get an adapter. null: all linear modules of the decoder's layers; of a mixture those of
    attention, dense layers and shared experts. Its other experts get adapters only if they are named:
    ``experts.gate_up_proj`` and ``experts.down_proj``; every expert of a layer then has its own."""
    base_dtype: Literal["int8", "nf4"] | None = None
    """Data type of the frozen matrices of the decoder's layers, in blocks of 64 values: ``int8``, or
    ``nf4`` with 4 bits (QLoRA, arXiv:2305.14314). The rounded weights are the base of the whole run:
    rollouts, reference and export use the same values. null keeps them in ``trainer.dtype``."""
    sync: Literal["auto", "merged", "adapter"] = "auto"
    """Weights that rollouts receive. ``adapter``: only the adapters; each rollout reads the frozen
    weights from ``model.path`` into host memory, verifies that they equal the trainer's, and
    merges. No GPU then needs a copy of the weights for the transfer. ``merged``: all weights,
    with the adapters merged. ``auto``: ``adapter``, or ``merged`` if the model is a preset
    (which has no folder), if experts have adapters, if ``logp`` has its own GPUs, if
    ``weight_sync.mode`` is ``inplace``, or if ``rollout.engine`` is ``none``."""

    @property
    def adapts_experts(self) -> bool:
        """True if the target modules include experts of a mixture."""
        return any(OF_EXPERTS in target for target in self.target_modules or ())


class CriticSpec(SpecPart):
    """Training of GAE's critic; other settings are those of the policy."""

    LAYOUT: ClassVar = ("tensor_parallel", "expert_parallel", "pipeline_parallel", "cpu_offload")
    """Keys of the trainer that a critic with its own GPUs has, too."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; null uses the policy's. A critic usually needs a higher one."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first steps that train only the critic, because advantages of an untrained critic
    are noise for the policy."""
    tensor_parallel: int = Field(1, ge=1)
    """As ``trainer.tensor_parallel``, for a critic with its own GPUs."""
    expert_parallel: int = Field(1, ge=1)
    """As ``trainer.expert_parallel``, for a critic with its own GPUs."""
    pipeline_parallel: int = Field(1, ge=1)
    """As ``trainer.pipeline_parallel``, for a critic with its own GPUs; 1 uses the engine ``fsdp``."""
    cpu_offload: bool | Literal["optimizer"] | None = None
    """As ``trainer.cpu_offload``, for a critic with its own GPUs; null uses the policy's."""


class BalancingSpec(SpecPart):
    """Load balancing of a mixture's experts."""

    kind: Literal["none", "loss", "bias"] = "none"
    """Method. ``none``: no balancing. ``loss``: the auxiliary loss that Qwen, Mixtral and gpt-oss
    were trained with. ``bias``: experts that are chosen less often get a bias in the choice, as
    in DeepSeek-V3 and GLM-4.5 (``e_score_correction_bias``)."""
    coefficient: float | None = Field(None, gt=0)
    """Weight of the auxiliary loss; null uses the model's ``router_aux_loss_coef``."""
    bias_rate: float = Field(1e-3, gt=0)
    """Change of an expert's bias per update."""


class LossScaleSpec(SpecPart):
    """Dynamic loss scaling of ``dtype: float16``, with the rules of ``torch.amp.GradScaler``."""

    initial: float = Field(65_536.0, ge=1, le=1e12)
    """First factor of the loss. An overflow halves it and skips the update, on all processes."""
    growth_interval: int = Field(2000, ge=1)
    """Consecutive updates without overflow after which the factor is doubled."""


class BestSpec(SpecPart):
    """The held-out score that selects the best checkpoint."""

    set: str | None = None
    """Name of a set in ``data.heldout``. null uses the only set, or the mean over the prompts of
    all sets."""
    metric: str = Field("greedy", pattern=r"^(greedy|sampled|best|maj|pass@[1-9][0-9]*|reward/.+)$")
    """Score of the set: ``greedy``, ``sampled``, ``best``, ``maj``, ``pass@K`` or ``reward/TERM``;
    the highest is best."""


class CheckpointSpec(SpecPart):
    """Frequency and retention of checkpoints."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints. 0 saves by time (``every_s``)."""
    every_s: float = Field(600.0, ge=0, le=MAX_SECONDS)
    """Seconds between checkpoints if ``every`` is 0: the first step that ends after them is saved.
    0 saves only at the end (``at_end``)."""
    at_end: bool = True
    """If true, the last step is saved. If false, it is saved only if ``every`` or ``every_s`` is due; then
    nothing can export the final weights or start from them."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    best: BestSpec | None = None
    """Score by which the best checkpoint is selected; that checkpoint is kept in addition to the
    newest. null keeps only the newest."""
    directory: FolderPath | None = None
    """Folder of the checkpoints. Default: ``checkpoints`` in the run's folder. With a URL such as
    ``s3://bucket/folder``, checkpoints are written to the run's folder, and uploaded while training
    continues."""
    start_from: FolderPath | None = None
    """Checkpoint folder of another run, or its URL in an object store, from which this run starts: its
    weights, optimizer state and step number. ``trainer.steps`` includes the steps of the checkpoint; the
    data starts with the first prompt. ``POST /v1/runs/{run_id}/fork`` sets this key and also continues the
    data order of the other run."""


def checkpoint_root(directory: str | None, run_folder: Path) -> Path:
    """Returns the folder of a run's checkpoints on the trainer's host."""
    if directory and not is_url(directory):
        return Path(directory)
    return run_folder / "checkpoints"


class TrainerSpec(SpecPart):
    """Batch, optimizer, precision and parallelism."""

    steps: int | None = Field(None, ge=1)
    """Number of steps of the whole run, each with one batch. null if ``data.epochs`` gives the
    length."""
    prompts_per_step: int = Field(ge=1)
    """Number of groups in one batch."""
    engine: Annotated[str, NameIn(TRAIN_ENGINES)] = "fsdp"
    """Training engine. ``fsdp``: FSDP2 with all settings below except ``pipeline_parallel``.
    ``stages``: FSDP2 in pipeline stages; it supports some families and some of the settings below.
    ``reference``: plain transformers in one process, one sequence at a time, to compare numerics
    with; it supports few of the settings below."""
    updates_per_step: int = Field(1, ge=1)
    """Number of mini-batches into which a batch is split, each with one optimizer update."""
    accumulate_early: bool = False
    """If true, a synchronous step trains groups as they finish, while other groups of the step are
    generated (arXiv:2511.18871). Gradients accumulate, and one update follows after the last
    group. The update equals that of the whole batch and is exactly on-policy."""
    tokens_per_micro_batch: int = Field(16_384, ge=1)
    """Packed tokens of one forward pass, per process. With ``context_parallel``, a micro-batch has
    this many tokens for each process that shares it."""
    share_prefixes: bool = True
    """If true, a prefix that samples of a micro-batch share, such as the prompt of a group, is
    computed once. Logprobs and gradients are the same as without."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and its learning-rate schedule."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Computation dtype of trainer and engines. Trained weights are always float32; frozen weights
    (the base under ``lora``, and the reference) have this dtype. ``float16`` has 8 times the
    precision of ``bfloat16``, so logprobs of trainer and engine differ less, and a smaller range:
    the loss is scaled (``loss_scale``)."""
    loss_scale: LossScaleSpec = LossScaleSpec()
    """Dynamic loss scaling of ``dtype: float16``."""
    world_size: int = Field(1, ge=1)
    """Number of trainer processes, one per GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes over which each layer is sharded."""
    expert_parallel: int = Field(1, ge=1)
    """Number of data-parallel processes over which the experts of each layer are distributed;
    tokens are sent to the processes that hold their experts, and back. Must divide the number of
    data-parallel processes and the experts of a layer. With ``tensor_parallel``, experts are
    distributed over as many times more processes."""
    context_parallel: int = Field(1, ge=1)
    """Number of processes over which the tokens of each micro-batch are split, and in attention its
    heads (arXiv:2309.14509); the max length of a sequence grows by this factor. Must divide the
    number of processes and the attention heads of each."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of pipeline stages, each with consecutive layers on its own processes; needs
    ``engine: stages``. While the pipeline fills and drains, stages are idle: with ``s`` stages and
    ``m`` micro-batches in an update, for a share of ``(s - 1) / (m + s - 1)`` of its passes. Lower
    ``tokens_per_micro_batch`` gives more micro-batches."""
    balancing: BalancingSpec = BalancingSpec()
    """Load balancing of a mixture's experts."""
    zero_stage: Literal[1, 3] = 3
    """Sharding over data-parallel processes (ZeRO, arXiv:1910.02054). 3 shards weights, gradients
    and optimizer state. 1 shards only the optimizer state: weights and gradients are exchanged
    once per update instead of in every micro-batch, and each GPU holds the weights and float32
    gradients of the whole model."""
    activation_checkpointing: bool | Literal["auto", "selective"] | Annotated[int, Field(ge=2)] = (
        "auto"
    )
    """Activations that the backward pass recomputes. false: none. true: all except the inputs of
    layers, for one third more operations. A number ``n``: the same, but only in every ``n``-th
    layer. ``selective``: only cheap operations; results of matrix products and attention are
    kept. ``auto``: the first of false, ``selective`` and true that fits the run into its GPUs'
    memory."""
    activation_offloading: bool = False
    """If true, the activations that layers keep for the backward pass are moved to host memory. The
    copies overlap with computation, and cost no time if layers keep little
    (``activation_checkpointing: true``)."""
    keep_gathered: bool | Literal["auto"] = "auto"
    """If true, a process that shards with no other keeps its weights in ``dtype`` from one micro-batch to the
    next. false gathers them layer by layer in each pass, which costs a copy and saves ``dtype``'s bytes per
    parameter. ``auto``: true, unless the run fits into its GPUs' memory only with false."""
    cpu_offload: bool | Literal["optimizer"] = False
    """State in host memory between uses. true: weights, gradients and optimizer state, with the
    optimizer running on the CPU. ``optimizer``: only the optimizer's moments, which are copied
    to the GPU for an update."""
    compile: bool = False
    """If true, torch.compile is applied to the decoder layers while engines start. Without a GPU it
    has no effect. The metric ``compilations`` of a step counts those that the step still had to
    wait for; it should be 0."""
    lora: LoraSpec | None = None
    """Low-rank adapters, trained instead of the full weights."""
    freeze_vision_tower: bool = True
    """If true, the vision tower of a model with ``model.images`` is not trained."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Frequency and retention of checkpoints."""
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of which each trainer process writes a profile for Perfetto or chrome://tracing to
    ``profiles/step-<step>-rank-<rank>.json.gz`` in the run's folder. Profiled steps take longer;
    the profile of the first step includes one-time work."""

    @property
    def stage_ranks(self) -> int:
        """Number of processes of a pipeline stage; of all without stages."""
        return self.world_size // self.pipeline_parallel

    @property
    def keeps_gathered(self) -> bool:
        """True if ranks keep gathered weights and whole gradients until an update's last micro-batch.

        A pipeline stage exchanges gradients after its last backward pass.
        """
        if self.may_free_gathered:
            return self.keep_gathered is not False
        return (
            self.stage_ranks == self.tensor_parallel
            or self.zero_stage == 1
            or self.pipeline_parallel > 1
        )

    @property
    def may_free_gathered(self) -> bool:
        """True if ``keep_gathered`` is a choice: FSDP shards all weights over this rank alone."""
        is_plain = self.zero_stage == 3 and self.pipeline_parallel == 1 and self.lora is None
        return is_plain and self.stage_ranks == self.tensor_parallel and not self.offloads_weights

    @property
    def casts_by_layer(self) -> bool:
        """True if a rank that is alone casts the weights of each layer when it computes or recomputes it."""
        is_recomputed = self.activation_checkpointing is True and not self.activation_offloading
        return (
            self.world_size == 1
            and not (self.dtype == "float32" or self.keeps_gathered or self.offloads_weights)
            and is_recomputed
        )

    @property
    def offloads_weights(self) -> bool:
        """True if weights and gradients are in host memory."""
        return self.cpu_offload is True
