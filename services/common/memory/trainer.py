"""Predicts the memory of trainer GPUs, KV caches and time-shared GPUs before a start: pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import lcm, prod
from typing import Any, Final, Literal

from transformers import PretrainedConfig

from services.common.callables import load_callable
from services.common.memory.sizes import (
    ConfigKey,
    ModelSize,
    Shapes,
    config_dict,
    head_width,
    kv_bytes,
    kv_heads,
    num_sources,
    num_weights,
    sent_adapters,
    shapes_of,
    wire_dtype,
)
from services.common.models.adapters import adapter_weights
from services.common.models.families import num_attention_layers, num_experts, recurrent_shape
from services.common.models.quantization import base_bytes, largest_quantized
from services.common.models.stages import head_in_layers, stage_layers, stages_of
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import OF_EXPERTS, OPTIMIZERS, TrainerSpec
from services.common.runspec.weight_modes import BUCKET_BYTES, MODES

Stays = Literal["all", "state", "nothing"]
"""Part of a trainer that stays on the GPU: all, its state between steps, or only the sent weights."""

# The rest is for memory that allocators cannot use.
_LARGEST_SHARE: Final = 0.9


def resident_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> Stays:
    """Returns the part of a colocated trainer that stays on the GPU while rollouts decode: as much as fits.

    The time of a switch is proportional to the bytes that move, so each side moves only as much as
    it must. If everything fits, engines also keep their memory. Both sides compute the same result from the
    same numbers.
    """
    if not spec.colocated_rollouts:
        return "nothing"
    for contents in ("all", "state"):
        resident_bytes = _kept(contents, spec, config, gpu_bytes=gpu_bytes)
        if _fits_beside_engines(resident_bytes, spec, config, gpu_bytes=gpu_bytes):
            return contents
    return "nothing"


def compiles_asleep(
    spec: RunSpec, config: PretrainedConfig, *, contents: Stays, gpu_bytes: int
) -> bool:
    """Returns True if a colocated trainer has memory to compile its layers while engines start.

    It then runs the first few of them on one micro-batch, with weights that stay on the GPU.

    Args:
        contents: Result of :func:`resident_memory`.
    """
    if contents == "nothing":
        return False
    sizes = dict(trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts)
    share = min(1.0, _COMPILED_LAYERS / config.get_text_config().num_hidden_layers)
    sizes["activations"] *= share
    gradients = sizes.get("gradients", 0.0)  # in host memory with ``trainer.cpu_offload``
    sizes["gradients"] = min(gradients, share * gradients + _FLOAT32 * _outside(config))
    resident_bytes = _own_bytes(sizes)
    if not _fits_beside_engines(resident_bytes, spec, config, gpu_bytes=gpu_bytes):
        return False
    # vLLM fails if less memory is free after it fell asleep, which may be before the trainer has compiled.
    weights = ModelSize.of(config, spec).on_each_gpu(spec)
    released = weights + kv_bytes(spec, config) / spec.engine_gpus
    return (
        contents == "all"
        or resident_bytes - _kept("state", spec, config, gpu_bytes=gpu_bytes) <= released
    )


def _fits_beside_engines(
    resident_bytes: float, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int
) -> bool:
    # If there are fewer KV heads than GPUs, each GPU of an engine has a copy of them.
    engine = ModelSize.of(config, spec).on_each_gpu(spec) + kv_bytes(spec, config) + ENGINE
    engines = spec.colocated_rollouts * spec.engine_gpus / spec.trainer.world_size
    return resident_bytes + engines * engine <= _LARGEST_SHARE * gpu_bytes


def sleeping_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Returns the bytes that a colocated trainer keeps on each of its GPUs while rollouts decode."""
    contents = resident_memory(spec, config, gpu_bytes=gpu_bytes)
    return _kept(contents, spec, config, gpu_bytes=gpu_bytes)


def _kept(contents: Stays, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    if contents == "all":
        sizes = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
        return _own_bytes(sizes)
    resident_bytes = sleeping_trainer_bytes(spec, config)
    if contents == "state":
        resident_bytes += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * resident_bytes


def _own_bytes(sizes: Mapping[str, float]) -> float:
    """Returns the bytes that a trainer's allocator reserves, without the memory of sleeping rollouts."""
    return SPARE * sum(size for name, size in sizes.items() if name != SLEEPING)


_GB: Final = 1e9
STATE: Final = ("weights, float32", "weights, frozen", "optimizer", "gradients", "reference")
"""Parts that exist between two micro-batches; the size of micro-batches does not change them."""
SLEEPING: Final = "sleeping rollouts"
"""Part of a trainer's GPU that sleeping rollouts use."""
SPARE: Final = 1.05
"""Memory that a trainer's allocator reserves, relative to the used memory."""
# Blocks that the allocator holds beside tensors, relative to activations: 1.6 GB beside 36 on one H200 with
# adapters (``bench/results/one-gpu-lora-h200.json``).
_CACHED_ACTIVATIONS: Final = 0.047
_FLOAT32: Final = 4
_MOMENTS: Final = 2 * _FLOAT32
CHUNK_BYTES: Final = 24 * (1 << 30) // 10
"""Max bytes of logits that the trainer computes at once."""
CONTEXT: Final = 1.8e9
"""Driver context, CUDA's libraries and compiled kernels."""
# Memory of a sleeping engine besides received weights: contexts, graphs, buffers of its
# collectives.
_SLEEPING: Final = 6.0e9
ENGINE: Final = 8.0e9
"""Memory of an engine besides weights and KV cache: activations, graphs, contexts, buckets."""
_KV_SHARE: Final = 0.1
"""Fraction of a GPU for the KV cache of an engine that shares it with a trainer, if it can use that much."""
_CHECKPOINTING_ORDER: Final = (False, "selective", True)
"""Values that ``trainer.activation_checkpointing: auto`` tries, in order."""
ROOM: Final = 256 << 20
"""Size of the shared buffer that the transport ``handle`` exports."""
# Tensors that a layer keeps of each token, in multiples of the hidden size, of all queries, and of
# all keys, besides its feed-forward part, which keeps gate, up and their product.
_HIDDENS, _QUERIES, _KEY_VALUES, _FEED_FORWARD = 4, 2, 2, 3
# The same for ``selective``, whose feed-forward part keeps gate and up.
_SELECTED_HIDDENS, _SELECTED_FEED_FORWARD = 3, 2
_GATHERED, _GRADIENTS = "weights gathered for a forward pass", "gradients of a pass"
HEAD_MULTIPLE: Final = 8
"""Multiple of head widths that the trainer's attention supports, to which it pads them."""
# Two layers of each of two kinds; see ``trainer/engines/fsdp/compiling.py``.
_COMPILED_LAYERS: Final = 4
# Layers whose activations are on the GPU if they are offloaded: one that computes, one in transfer.
_LAYERS_HERE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on one GPU of a trainer, at its peak."""

    total: int
    """Memory of the GPU."""
    parts: Mapping[str, float]
    host: Mapping[str, float]
    """Bytes of host memory per GPU, by part."""
    cached: float = 0.0
    """Bytes that the allocator holds besides: blocks that one stream freed and another cannot use. It gives
    them back when the trainer itself lacks memory, but not when another process does."""
    worker: str = "trainer"
    work: str = "training"
    remedy: str = (
        "slipstream validate --gpu-gb prints the smallest change that fits; more GPUs (trainer.world_size) "
        "share weights, and trainer.context_parallel long sequences"
    )

    @property
    def used(self) -> float:
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes that other processes of the GPU cannot use."""
        return self.used + self.cached

    def table(self, num_gpus: int) -> str:
        head = f"each of the {self.worker}'s {num_gpus} GPU(s), with {self.total / _GB:.1f} GB"
        rows = [*self.parts.items(), ("left", self.total - self.used)]
        rows += [(f"in host memory: {name}", size) for name, size in self.host.items()]
        return "\n".join([head, *(f"  {name:<34}{size / _GB:8.1f} GB" for name, size in rows)])

    def check(self, num_gpus: int) -> None:
        """Checks that the parts fit on the GPU.

        Raises:
            ValueError: If they do not; the message has the figures and the fix.
        """
        if self.used > self.total:
            raise ValueError(
                f"{self.work} does not fit: a GPU of the {self.worker} has {self.total / _GB:.1f} GB, but "
                f"{self.work} needs about {self.used / _GB:.1f} GB; {self.remedy}\n{self.table(num_gpus)}"
            )


def trainer_memory(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, engines: int = 0
) -> TrainerMemory:
    """Predicts the memory of a run's trainer on GPUs of a given size.

    Args:
        engines: Rollouts that decode on the same GPU while it trains.
    """
    return fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines)[1]


def fitted(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, engines: int = 0
) -> tuple[RunSpec, TrainerMemory]:
    """Gives trainer's ``activation_checkpointing`` and ``keep_gathered`` a value; returns its memory too.

    All processes of a run choose the same value from the same numbers. The arguments are those of
    :func:`trainer_memory`.
    """
    trainer = spec.trainer
    recomputed, gathered = trainer.activation_checkpointing, trainer.keep_gathered
    ways = _CHECKPOINTING_ORDER if recomputed == "auto" else (recomputed,)
    choices = (True, False)[: 1 + trainer.may_free_gathered] if gathered == "auto" else (gathered,)
    cache = min(kv_bytes(spec, config), _KV_SHARE * gpu_bytes)
    engine = ModelSize.of(config, spec).on_each_gpu(spec) + cache + ENGINE
    room = gpu_bytes - engines * engine
    for keeps, way in product(choices, ways):
        update = {"activation_checkpointing": way, "keep_gathered": keeps}
        fitted_spec = spec.model_copy(update={"trainer": trainer.model_copy(update=update)})
        memory = _memory_of(fitted_spec, config, gpu_bytes=gpu_bytes)
        if (memory.reserved if engines else SPARE * memory.used) <= room:
            break
    return fitted_spec, memory


def _memory_of(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> TrainerMemory:
    """Predicts the memory of the rank that needs the most; ranks differ between pipeline stages."""
    has_head = not spec.algorithm.loss_kind.trains_values
    stages = _stages(ConfigKey(config), spec.trainer.pipeline_parallel, has_head=has_head)
    memories = [_memory_of_stage(spec, config, stage, gpu_bytes=gpu_bytes) for stage in stages]
    return max(memories, key=lambda memory: memory.used)


@lru_cache(maxsize=8)
def _stages(key: ConfigKey, num_stages: int, *, has_head: bool) -> "list[_Stage]":
    """Returns what each pipeline stage holds at most."""
    shapes, text_config = shapes_of(key.config), key.config.get_text_config()
    is_tied, text = bool(text_config.tie_word_embeddings), config_dict(text_config)
    head = head_in_layers(text, shapes)
    division = stage_layers(int(text["num_hidden_layers"]), num_stages, head=head)
    stages = []
    for number, layers in enumerate(division):
        held_shapes = {
            name: size
            for name, size in shapes.items()
            if num_stages == 1 or number in stages_of(name, division, is_tied=is_tied)
        }
        # Micro-batches before the first backward pass: under 1F1B as many as there are stages from this
        # one on, and all if there are fewer of them than stages.
        num_packs = num_stages - min(number, 1)
        is_last = has_head and number == num_stages - 1
        stages.append(_Stage(held_shapes, len(layers), num_packs, has_head=is_last))
    return stages


@dataclass(frozen=True, slots=True)
class _Stage:
    """Weights of a pipeline stage, or of the whole model without stages."""

    shapes: Shapes
    """Shapes of its weights by name."""
    num_layers: int
    num_packs: int
    """Micro-batches whose activations it holds at once."""
    has_head: bool


def _memory_of_stage(
    spec: RunSpec, config: PretrainedConfig, stage: _Stage, *, gpu_bytes: int
) -> TrainerMemory:
    trainer, shapes = spec.trainer, stage.shapes
    weights = num_weights(shapes)
    trained = weights if trainer.lora is None else adapter_weights(shapes, trainer.lora)
    item = wire_dtype(spec).itemsize
    base_dtype = None if trainer.lora is None else trainer.lora.base_dtype
    base = base_bytes(shapes, base_dtype, item=item)
    ranks = trainer.stage_ranks
    # A rank that keeps gathered weights holds the frozen weights whole.
    frozen_ranks = 1 if trainer.keeps_gathered and not trainer.offloads_weights else ranks
    critics = int(
        spec.algorithm.advantage_kind.needs_critic and not spec.topology.own_gpus("critic")
    )
    sharded, computed = _sharded(trainer, shapes), _computed(trainer, shapes)
    if trainer.lora is None:
        sharded, computed = (1 + critics) * sharded, (1 + critics) * computed
    else:
        # A critic is trained without adapters.
        sharded = trained / ranks + critics * sharded
        computed = trained / trainer.tensor_parallel + critics * computed
    optimizer = OPTIMIZERS[trainer.optimizer.kind]
    num_tokens = _max_micro_batch_tokens(spec)
    gathers_all = trainer.keeps_gathered and not trainer.offloads_weights
    gathered = 0.0
    if gathers_all and _has_mesh(trainer):
        gathered = item * computed
    elif _has_mesh(trainer) and not trainer.casts_by_layer:
        gathered = (1 + critics) * _gathered(trainer, config, stage, item=item)
        gathered -= item * _layer_weights(trainer, config, stage)  # a part of the peak
    peak, offloaded = _passes(spec, config, stage, item=item)
    sizes = {
        "weights, float32": _FLOAT32 * sharded,
        "weights, frozen": base / frozen_ranks if trainer.lora is not None else 0.0,
        "optimizer": load_callable(optimizer.state_bytes)(shapes) * (1 + critics) / ranks
        if optimizer.state_bytes
        else _MOMENTS * sharded,
        "gradients": _FLOAT32 * (computed if gathers_all else sharded),
        "a weight, dequantized": 0.0 if base_dtype is None else item * largest_quantized(shapes),
        "moments, dequantized": optimizer.working_bytes,
        **peak,
        _GATHERED: gathered + peak.get(_GATHERED, 0.0),
        "states between stages": _exchanged(trainer, config, item=item, num_packs=stage.num_packs)
        * num_tokens,
        "weights in transfer": _sent(spec, shapes),
        "context": CONTEXT,
    }
    if spec.topology.is_colocated:
        sizes[SLEEPING] = item * weights / spec.engine_gpus + _SLEEPING
    if spec.needs_reference and not spec.topology.own_gpus("ref_logp"):
        reference = base if spec.teacher is None else item * weights
        sizes["reference"] = reference / frozen_ranks
        if _has_mesh(trainer) and not gathers_all:
            sizes["reference"] += _gathered(trainer, config, stage, item=item)
    cached = _CACHED_ACTIVATIONS * sizes["activations"]
    if ranks > 1 and gathers_all:
        # Whole gradients are freed in one stream, and sharded ones allocated in another.
        cached += sizes["gradients"]
    moved_names = {False: (), "optimizer": ("optimizer",), True: STATE}[trainer.cpu_offload]
    host = {name: sizes.pop(name) for name in moved_names if name in sizes}
    host["activations"] = offloaded
    if MODES[spec.weight_sync.mode].copies_to_host and sent_adapters(spec, shapes) is None:
        host["weights in transfer"] = _weight_copy(spec, shapes)[0]
    return TrainerMemory(
        total=gpu_bytes,
        parts={name: size for name, size in sizes.items() if size},
        host={name: size for name, size in host.items() if size},
        cached=cached,
    )


def sleeping_trainer_bytes(spec: RunSpec, config: PretrainedConfig) -> float:
    """Returns the bytes that a trainer keeps per GPU in the rollouts' turn: sent weights and context."""
    return _sent(spec, shapes_of(config)) + CONTEXT


def state_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Returns the bytes of a trainer on each GPU between two steps: weights, optimizer and reference."""
    sizes = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
    return sum(sizes.get(name, 0.0) for name in STATE if name != "gradients")


def _has_mesh(trainer: TrainerSpec) -> bool:
    return trainer.world_size > 1 or trainer.dtype != "float32" or trainer.offloads_weights


def _sharded(trainer: TrainerSpec, shapes: Shapes) -> float:
    """Returns the number of weights that a rank holds between two passes.

    FSDP2 shards everything over data-parallel ranks. Tensor-parallel ranks divide layers, and each has its
    own shards of what is outside of them.
    """
    outside = sum(prod(shape) for name, shape in shapes.items() if ".layers." not in name)
    layers = num_weights(shapes) - outside
    return (outside * trainer.tensor_parallel + layers) / trainer.stage_ranks


def _computed(trainer: TrainerSpec, shapes: Shapes) -> float:
    """Returns the number of weights that a rank computes with once its shards are gathered."""
    tensor = trainer.tensor_parallel
    return sum(
        prod(shape)
        / (tensor if ".layers." in name else 1)
        / (trainer.expert_parallel if f".{OF_EXPERTS}" in name else 1)
        for name, shape in shapes.items()
    )


def _gathered(trainer: TrainerSpec, config: PretrainedConfig, stage: _Stage, *, item: int) -> float:
    """Returns the bytes of weights in the dtype of the pass: two layers, and what is outside of them."""
    layer = _layer_weights(trainer, config, stage)
    return float(item * (_outside_of(config, stage.shapes) + 2 * layer))


def _layer_weights(trainer: TrainerSpec, config: PretrainedConfig, stage: _Stage) -> float:
    """Returns the mean number of a layer's weights that a rank computes with."""
    inside = _computed(trainer, stage.shapes) - _outside_of(config, stage.shapes)
    return max(0.0, inside) / stage.num_layers


def _outside_of(config: PretrainedConfig, shapes: Shapes) -> int:
    """Returns the number of weights outside the layers that a stage holds: embeddings, head, both or none."""
    text: Any = config.get_text_config()
    size = (int(text.vocab_size), int(text.hidden_size))
    return min(_outside(config), sum(prod(shape) for shape in shapes.values() if shape == size))


def _outside(config: PretrainedConfig) -> int:
    """Returns the number of weights outside the layers: embeddings and head."""
    shape: Any = config.get_text_config()
    return int(shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2))


def _max_micro_batch_tokens(spec: RunSpec) -> int:
    """Returns the max. tokens of a micro-batch on one rank: a longer sequence is a micro-batch by itself."""
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    rank_tokens = -(-longest // spec.trainer.context_parallel)
    return max(spec.trainer.tokens_per_micro_batch, rank_tokens)


def _exchanged(
    trainer: TrainerSpec, config: PretrainedConfig, *, item: int, num_packs: int
) -> float:
    """Returns the bytes per token of states and gradients that a pipeline stage holds for others."""
    if trainer.pipeline_parallel == 1:
        return 0.0
    return 2.0 * item * float(config.get_text_config().hidden_size) * num_packs


def _passes(
    spec: RunSpec, config: PretrainedConfig, stage: _Stage, *, item: int
) -> tuple[dict[str, float], float]:
    """Returns the bytes of a pass at its peak by part, and those of activations in host memory.

    The peak is in the backward pass: that of the head, of a layer, or of the sum of a layer's gradients.
    """
    trainer, text = spec.trainer, config.get_text_config()
    num_tokens, hidden = _max_micro_batch_tokens(spec), int(text.hidden_size)
    layer = _layer(trainer, config, stage.shapes, item=item)
    here, there = _kept_by_layers(trainer, layer, hidden=item * hidden, stage=stage)
    # Embedded tokens, and the final norm's input and output.
    kept_bytes = num_tokens * (here + (_FLOAT32 + 2 * item) * hidden)
    trains_weights = trainer.lora is None
    head = int(text.vocab_size) * hidden
    chunk = min(num_tokens, CHUNK_BYTES // (_FLOAT32 * int(text.vocab_size)))
    logits = (_FLOAT32 + item) * chunk * int(text.vocab_size)
    layer_weights = trains_weights * _layer_weights(trainer, config, stage)
    # The head's gradient waits for that of the embedding. Gradients of a layer exist one after the other.
    waiting = item * (head * stage.has_head * trains_weights + layer_weights / 2)
    again = layer.most if trainer.activation_checkpointing else 0.0
    # One layer is gathered while the head computes; two, its own and the next, while a layer does.
    cast_head, next_layer = 0.0, item * _layer_weights(trainer, config, stage)
    if trainer.casts_by_layer:
        cast_head = float(item * head)
    elif not _has_mesh(trainer) or (trainer.keeps_gathered and not trainer.offloads_weights):
        next_layer = 0.0
    backward_bytes = kept_bytes + num_tokens * (again + layer.transient)
    moments = [{"activations": backward_bytes, _GRADIENTS: waiting, _GATHERED: next_layer}]
    if stage.has_head:
        of_head = trains_weights * (_FLOAT32 + item) * head
        moments.append(
            {"activations": kept_bytes, "logits": logits, _GRADIENTS: of_head, _GATHERED: cast_head}
        )
    if _has_mesh(trainer) and not trainer.casts_by_layer:
        summed = _FLOAT32 * layer_weights * (1 + 1 / trainer.stage_ranks)
        summed += item * head * stage.has_head * trains_weights
        moments.append({"activations": kept_bytes, _GRADIENTS: summed, _GATHERED: next_layer})
    return max(moments, key=lambda sizes: sum(sizes.values())), num_tokens * there


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes per token of the activations of a layer."""

    mean: float
    """Bytes that a layer keeps in the mean."""
    most: float
    """Bytes that the largest layer keeps."""
    selected: float
    """Bytes that a layer keeps with ``activation_checkpointing: selective``."""
    transient: float
    """Gradients that exist at once in its backward pass."""


def _kept_by_layers(
    trainer: TrainerSpec, layer: _Layer, *, hidden: float, stage: _Stage
) -> tuple[float, float]:
    """Returns the bytes per token that layers keep at once on the GPU, and in host memory."""
    recomputed, layers = trainer.activation_checkpointing, stage.num_layers
    assert recomputed != "auto", "the caller chooses"
    if recomputed == "selective":
        layer_sizes = [layer.selected] * layers
    else:
        layer_sizes = [
            hidden if recomputed and number % recomputed == 0 else layer.mean
            for number in range(layers)
        ]
    layer_sizes *= stage.num_packs
    if not trainer.activation_offloading:
        return sum(layer_sizes), 0.0
    if recomputed == "selective" and not trainer.compile:
        return sum(layer_sizes), layers * hidden
    return min(layers, _LAYERS_HERE) * max(layer_sizes), sum(layer_sizes)


def _layer(trainer: TrainerSpec, config: PretrainedConfig, shapes: Shapes, *, item: int) -> _Layer:
    """Counts the tensors that a layer keeps, as ``bench/trainer/counted.py`` does in a pass."""
    text: Any = config.get_text_config()
    eager, hidden = int(not trainer.compile), int(text.hidden_size)
    experts = num_experts(config_dict(text))
    num_dense = (
        int(getattr(text, "first_k_dense_replace", 0) or 0)
        if experts
        else int(text.num_hidden_layers)
    )
    dense = int(text.intermediate_size)
    per_token = int(text.num_experts_per_tok) if experts else 0
    # Rows of a token's experts, both of their products, and gated values.
    routed = item * per_token * (hidden + 3 * _expert_width(text))
    shared = _shared_width(text) if experts else 0
    attended = _attended(trainer, config, shapes, item=item)
    common = _HIDDENS * item * hidden + attended
    # Without torch.compile, the two norms keep their float32 inputs, and activations their inputs.
    common += eager * 2 * _FLOAT32 * hidden
    bytes_of_width = item * (_FEED_FORWARD + eager) / trainer.tensor_parallel
    of_dense = common + bytes_of_width * dense
    of_mixture = common + bytes_of_width * shared + routed / trainer.tensor_parallel
    share = num_dense / int(text.num_hidden_layers)
    inner = share * dense + (1 - share) * (shared + per_token * _expert_width(text))
    selected = _SELECTED_HIDDENS * item * hidden + _SELECTED_FEED_FORWARD * item * inner
    selected += _attended(trainer, config, shapes, item=item, keeps_norms=False)
    selected += (1 - share) * item * per_token * hidden
    transient = item * (dense / trainer.tensor_parallel + hidden)
    if experts:
        copies = 1 + (trainer.expert_parallel > 1)
        rows = per_token * (copies * hidden + _expert_width(text)) / trainer.tensor_parallel
        transient = max(transient * (num_dense > 0), item * (rows - 3 * hidden), item * hidden)
    return _Layer(
        mean=share * of_dense + (1 - share) * of_mixture,
        most=max(of_dense * (share > 0), of_mixture * (share < 1)),
        selected=selected,
        transient=transient,
    )


def _attended(
    trainer: TrainerSpec,
    config: PretrainedConfig,
    shapes: Shapes,
    *,
    item: int,
    keeps_norms: bool = True,
) -> float:
    """Returns the bytes per token that attention keeps in a layer: queries, keys, values and outputs.

    Args:
        keeps_norms: False if the norms of queries and keys are computed again.
    """
    text: Any = config.get_text_config()
    queries, tensor = int(text.num_attention_heads), trainer.tensor_parallel
    eager = int(not trainer.compile)
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:
        # Latent attention has keys for all queries, and pads values to their width.
        latent = int(rank) + int(getattr(text, "q_lora_rank", None) or 0)
        width = int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim)
        expanded = width + int(text.qk_nope_head_dim) + int(text.v_head_dim)
        width = -(-width // HEAD_MULTIPLE) * HEAD_MULTIPLE
        heads = queries / tensor * (4 * width + eager * expanded)
        return float(item * heads + (item + eager * _FLOAT32) * latent)
    # Heads are repeated until each rank that shares the pack has the same number.
    keys = lcm(kv_heads(config), tensor * trainer.context_parallel)
    attended: float = item * (_QUERIES * queries + _KEY_VALUES * keys)
    if keeps_norms and any(name.endswith(".q_norm.weight") for name in shapes):
        attended += (item + eager * _FLOAT32) * (queries + keys)
    attended *= head_width(config) / tensor
    layers = int(text.num_hidden_layers)
    attended *= num_attention_layers(config_dict(text)) / layers
    if (recurrent := recurrent_shape(config_dict(text))) is not None:
        # A recurrent layer keeps the inputs and outputs of its convolution and of its gates.
        kept_width = 2 * recurrent.channels + 2 * recurrent.width
        attended += recurrent.num_layers / layers * item * kept_width
    return attended


def _shared_width(text: Any) -> int:
    """Returns the width of the experts that all tokens pass."""
    if width := getattr(text, "shared_expert_intermediate_size", None):
        return int(width)
    return int(getattr(text, "n_shared_experts", None) or 0) * _expert_width(text)


def _expert_width(text: Any) -> int:
    return int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)


def _sent(spec: RunSpec, shapes: Shapes) -> float:
    """Returns the bytes of the copy that a rank sends to the rollouts.

    Args:
        shapes: Shapes of the weights of its pipeline stage, of all without stages.
    """
    if (adapters := sent_adapters(spec, shapes)) is not None:
        return adapters + _exported_bytes(spec)
    copy, sources = _weight_copy(spec, shapes)
    if MODES[spec.weight_sync.mode].copies_to_host:
        bucket = spec.weight_sync.staged_bucket_bytes(BUCKET_BYTES["cuda"], num_sources=sources)
        return min(copy, 2.0 * bucket) + _exported_bytes(spec)
    return copy + _exported_bytes(spec)


def _weight_copy(spec: RunSpec, shapes: Shapes) -> tuple[float, int]:
    """Returns the bytes of a rank's copy of whole weights, and the sources that divide those of a stage."""
    sources = max(1, num_sources(spec) // spec.trainer.pipeline_parallel)
    return wire_dtype(spec).itemsize * num_weights(shapes) / sources, sources


def _exported_bytes(spec: RunSpec) -> int:
    """Returns the bytes of the shared buffer that a trainer exports to rollouts on its only GPU."""
    backend, num_here = spec.weight_sync.backend, spec.colocated_rollouts
    share_one = spec.trainer.world_size == 1 and 0 < num_here == spec.rollout.replicas
    return ROOM if backend == "handle" or (backend == "auto" and share_one) else 0
