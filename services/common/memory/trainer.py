"""Predicts the memory of trainer GPUs, KV caches and time-shared GPUs before a start: pure arithmetic.

Weights, gradients and optimizer follow from the layout (``trainer/engines/fsdp/parallel.py``) and are
exact. The estimate of activations counts the tensors that the compiled layers of a decoder keep for
the backward pass; it was within 5 % of the peak of two runs on H200s (a 1.5B model, packs of 41k
tokens: 110 GiB on one GPU, 96 on two with ``zero_stage`` 1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Any, Final, Literal

import torch
from transformers import PretrainedConfig

from services.common.models.adapters import adapter_weights
from services.common.models.evaluator import parse_config
from services.common.models.families import num_attention_layers, num_experts, recurrent_shape
from services.common.models.loading import build_model, stored_tensors
from services.common.models.quantization import (
    PART_BYTES,
    base_bytes,
    fp8_bytes,
    largest_quantized,
    moment_bytes,
)
from services.common.models.stages import head_in_layers, stage_layers, stages_of
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import OF_EXPERTS, TrainerSpec
from services.common.runspec.weight_modes import MODES

_BLOCK_TOKENS: Final = 16
_BLOCKS_SPARE: Final = 1.05
# Copies of a layer while it is quantized: received, loaded, and a second time to verify it.
_QUANTIZING: Final = 4


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token, in all layers that attend."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * dtype.itemsize * heads * width * num_attention_layers(_config_dict(text))


def required_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Returns the max. tokens in a rollout's KV cache: every slot with the longest response.

    At least the longest context of the engine, without which it does not start.
    """
    rollout, limit = spec.rollout, int(config.max_position_embeddings)
    longest = min(spec.data.max_prompt_tokens + rollout.max_response_tokens, limit)
    blocks = -(-longest // _BLOCK_TOKENS) + 1
    tokens = int(_BLOCKS_SPARE * rollout.max_running_samples * blocks * _BLOCK_TOKENS)
    return max(tokens, min_kv_tokens(spec, config))


def min_kv_tokens(spec: RunSpec, config: PretrainedConfig) -> int:
    """Returns the tokens of a KV cache with which a rollout's engine starts: one longest context."""
    kind = engine_kind(spec.rollout.engine)
    given = spec.rollout.engine_arguments.get(kind.length_argument or "")
    return int(_BLOCKS_SPARE * int(given or config.max_position_embeddings))


def cache_dtype(spec: RunSpec) -> torch.dtype:
    """Returns the dtype of a rollout's KV cache."""
    dtype: torch.dtype = getattr(torch, spec.trainer.dtype)
    return dtype if spec.rollout.kv_cache_dtype is None else torch.float8_e4m3fn


def kv_bytes(spec: RunSpec, config: PretrainedConfig) -> float:
    """Returns the bytes of a rollout's KV cache: the configured size, or the size that it can use."""
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    given = arguments.get(kind.cache_argument or "")
    if given is not None and kind.cache_in_bytes:
        return float(given)
    tokens = required_kv_tokens(spec, config) if given is None else int(given)
    return float(tokens * kv_bytes_per_token(config, cache_dtype(spec)))


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
    for stays in ("all", "state"):
        kept = _kept(stays, spec, config, gpu_bytes=gpu_bytes)
        if _fits_beside_engines(kept, spec, config, gpu_bytes=gpu_bytes):
            return stays
    return "nothing"


def compiles_asleep(
    spec: RunSpec, config: PretrainedConfig, *, stays: Stays, gpu_bytes: int
) -> bool:
    """Returns True if a colocated trainer has memory to compile its layers while engines start.

    It then runs the first few of them on one micro-batch, with weights that stay on the GPU.

    Args:
        stays: Result of :func:`resident_memory`.
    """
    if stays == "nothing":
        return False
    parts = dict(trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts)
    share = min(1.0, _COMPILED_LAYERS / config.get_text_config().num_hidden_layers)
    parts["activations"] *= share
    gradients = parts.get("gradients", 0.0)  # in host memory with ``trainer.cpu_offload``
    parts["gradients"] = min(gradients, share * gradients + _FLOAT32 * _outside(config))
    kept = _own_bytes(parts)
    if not _fits_beside_engines(kept, spec, config, gpu_bytes=gpu_bytes):
        return False
    # vLLM fails if less memory is free after it fell asleep, which may be before the trainer has compiled.
    released = _rollout_weights(spec, shapes_of(config)) + kv_bytes(spec, config) / spec.engine_gpus
    return stays == "all" or kept - _kept("state", spec, config, gpu_bytes=gpu_bytes) <= released


def _fits_beside_engines(
    kept: float, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int
) -> bool:
    # If there are fewer KV heads than GPUs, each GPU of an engine has a copy of them.
    engine = _rollout_weights(spec, shapes_of(config)) + kv_bytes(spec, config) + ENGINE
    engines = spec.colocated_rollouts * spec.engine_gpus / spec.trainer.world_size
    return kept + engines * engine <= _LARGEST_SHARE * gpu_bytes


def sleeping_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Returns the bytes that a colocated trainer keeps on each of its GPUs while rollouts decode."""
    stays = resident_memory(spec, config, gpu_bytes=gpu_bytes)
    return _kept(stays, spec, config, gpu_bytes=gpu_bytes)


def _kept(stays: Stays, spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    if stays == "all":
        parts = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
        return _own_bytes(parts)
    kept = sleeping_trainer_bytes(spec, config)
    if stays == "state":
        kept += state_memory(spec, config, gpu_bytes=gpu_bytes)
    return SPARE * kept


def _own_bytes(parts: Mapping[str, float]) -> float:
    """Returns the bytes that a trainer's allocator reserves, without the memory of sleeping rollouts."""
    return SPARE * sum(size for name, size in parts.items() if name != SLEEPING)


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
# Driver context, CUDA's libraries and compiled kernels.
_FLOAT32: Final = 4
_MOMENTS: Final = 2 * _FLOAT32
# Up to two parts of float32 moments, and as much again to quantize one of them.
_DEQUANTIZED: Final = 4.0
# Chunks of logits and tensors derived from them; see ``trainer/algorithm/logprobs.py``.
_LOGITS: Final = 5.0e9
_CONTEXT: Final = 1.8e9
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
# Two layers of each of two kinds; see ``trainer/engines/fsdp/compiling.py``.
_COMPILED_LAYERS: Final = 4
# Layers whose activations are on the GPU if they are offloaded: one that computes, one in transfer.
_LAYERS_HERE: Final = 2
# Without torch.compile the norms also keep their float32 input, and the activation its input.
_EAGER_NORMS: Final = 2


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

    @property
    def used(self) -> float:
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes that other processes of the GPU cannot use."""
        return self.used + self.cached

    def table(self, num_gpus: int) -> str:
        head = f"each of the trainer's {num_gpus} GPU(s), with {self.total / _GB:.1f} GB"
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
                f"training does not fit: a GPU of the trainer has {self.total / _GB:.1f} GB, but training "
                f"needs about {self.used / _GB:.1f} GB; slipstream validate --gpu-gb {self.total / _GB:.0f} "
                "prints the smallest change that fits; more GPUs (trainer.world_size) share weights, and "
                "trainer.context_parallel long sequences\n" + self.table(num_gpus)
            )


def trainer_memory(
    spec: RunSpec,
    config: PretrainedConfig,
    *,
    gpu_bytes: int,
    engines: int = 0,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> TrainerMemory:
    """Predicts the memory of a run's trainer on GPUs of a given size.

    Args:
        engines: Rollouts that decode on the same GPU while it trains.
        shapes: Result of :func:`shapes_of` for its model, if already known.
    """
    shapes = shapes_of(config) if shapes is None else shapes
    spec = fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines, shapes=shapes)
    return _memory_of(spec, config, gpu_bytes=gpu_bytes, shapes=shapes)


def fitted(
    spec: RunSpec,
    config: PretrainedConfig,
    *,
    gpu_bytes: int,
    engines: int = 0,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> RunSpec:
    """Returns the run with a value for ``trainer.activation_checkpointing``, if it is ``auto``.

    All processes of a run choose the same value from the same numbers. The arguments are those of
    :func:`trainer_memory`.
    """
    if spec.trainer.activation_checkpointing != "auto":
        return spec
    shapes = shapes_of(config) if shapes is None else shapes
    room = gpu_bytes - engines * _min_engine_bytes(spec, config, shapes, gpu_bytes=gpu_bytes)
    for way in _CHECKPOINTING_ORDER:
        trainer = spec.trainer.model_copy(update={"activation_checkpointing": way})
        found = spec.model_copy(update={"trainer": trainer})
        memory = _memory_of(found, config, gpu_bytes=gpu_bytes, shapes=shapes)
        if (memory.reserved if engines else SPARE * memory.used) <= room:
            break
    return found


def weight_copies(spec: RunSpec) -> int:
    """Returns the number of copies of all weights on a rollout's GPUs: live ones, and ones being received."""
    return 1 if spec.sends_adapters or MODES[spec.weight_sync.mode].is_in_place else 2


def served_weights(spec: RunSpec, shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
    """Returns the bytes of an engine's live weights, and of its memory for quantizing new ones.

    Args:
        shapes: Result of :func:`shapes_of` for its model.
    """
    item, rollout = getattr(torch, spec.trainer.dtype).itemsize, spec.rollout
    kind = rollout.quantization
    if kind is None or engine_kind(rollout.engine).quantizations.get(kind) is None:
        return item * _num_weights(shapes), 0.0
    weights, largest = fp8_bytes(shapes, kind, item=item, num_exact=rollout.unquantized_layers)
    return weights, _QUANTIZING * largest


def _rollout_weights(spec: RunSpec, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the bytes of live and received weights on each GPU of a rollout."""
    live, quantizing = served_weights(spec, shapes)
    dtype: torch.dtype = getattr(torch, spec.trainer.dtype)
    sent = dtype.itemsize * _num_weights(shapes)
    return (live + (weight_copies(spec) - 1) * sent) / spec.engine_gpus + quantizing


def _min_engine_bytes(
    spec: RunSpec,
    config: PretrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    gpu_bytes: int,
) -> float:
    """Returns the min. bytes of an engine on a GPU that it shares with a running trainer."""
    cache = min(kv_bytes(spec, config), _KV_SHARE * gpu_bytes)
    return _rollout_weights(spec, shapes) + cache + ENGINE


def _memory_of(
    spec: RunSpec,
    config: PretrainedConfig,
    *,
    gpu_bytes: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> TrainerMemory:
    """Predicts the memory of the rank that needs the most; ranks differ between pipeline stages."""
    text = _config_dict(config.get_text_config())
    head, num_stages = head_in_layers(text, shapes), spec.trainer.pipeline_parallel
    division = stage_layers(int(text["num_hidden_layers"]), num_stages, head=head)
    memories = [
        _memory_of_stage(spec, config, stage, gpu_bytes=gpu_bytes)
        for stage in _stages(config, shapes, division)
    ]
    return max(memories, key=lambda memory: memory.used)


def _stages(
    config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], division: Sequence[range]
) -> "Iterator[_Stage]":
    """Yields what each pipeline stage holds at most."""
    is_tied = bool(config.get_text_config().tie_word_embeddings)
    for number, layers in enumerate(division):
        held = {
            name: size
            for name, size in shapes.items()
            if number in stages_of(name, division, is_tied=is_tied)
        }
        # Micro-batches before the first backward pass: under 1F1B as many as there are stages from this
        # one on, and all if there are fewer of them than stages.
        num_packs = len(division) - min(number, 1)
        yield _Stage(held, len(layers), num_packs, has_head=number == len(division) - 1)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Weights of a pipeline stage, or of the whole model without stages."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of its weights by name."""
    num_layers: int
    num_packs: int
    """Micro-batches whose activations it holds at once."""
    has_head: bool


def _memory_of_stage(
    spec: RunSpec, config: PretrainedConfig, stage: _Stage, *, gpu_bytes: int
) -> TrainerMemory:
    trainer, shapes = spec.trainer, stage.shapes
    weights = _num_weights(shapes)
    trained = weights if trainer.lora is None else adapter_weights(shapes, trainer.lora)
    item = getattr(torch, trainer.dtype).itemsize
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
    in_8bit = trainer.optimizer.kind == "adamw_8bit"
    activations = _activations(
        trainer, config, item=item, layers=stage.num_layers, num_packs=stage.num_packs
    )
    num_tokens = _max_micro_batch_tokens(spec)
    gathers_all = trainer.keeps_gathered and not trainer.offloads_weights
    gathered = 0.0
    if _has_mesh(trainer):
        gathered = item * computed
        if not gathers_all:
            gathered = (1 + critics) * _gathered(trainer, config, shapes, item=item)
    parts = {
        "weights, float32": _FLOAT32 * sharded,
        "weights, frozen": base / frozen_ranks if trainer.lora is not None else 0.0,
        "optimizer": moment_bytes(shapes) * (1 + critics) / ranks
        if in_8bit
        else _MOMENTS * sharded,
        "gradients": _FLOAT32 * (computed if gathers_all else sharded),
        "weights gathered for a forward pass": gathered,
        "a weight, dequantized": 0.0 if base_dtype is None else item * largest_quantized(shapes),
        "moments, dequantized": _DEQUANTIZED * PART_BYTES * in_8bit,
        "activations": num_tokens * activations.here,
        "logits": stage.has_head * min(_LOGITS, 3.0 * _FLOAT32 * config.vocab_size * num_tokens),
        "states between stages": _exchanged(trainer, config, item=item, num_packs=stage.num_packs)
        * num_tokens,
        "weights in transfer": _sent(spec, shapes, item=item),
        "context": _CONTEXT,
    }
    if spec.topology.is_colocated:
        parts[SLEEPING] = item * weights / spec.engine_gpus + _SLEEPING
    if spec.needs_reference and not spec.topology.own_gpus("ref_logp"):
        reference = base if spec.teacher is None else item * weights
        parts["reference"] = reference / frozen_ranks
        if _has_mesh(trainer) and not gathers_all:
            parts["reference"] += _gathered(trainer, config, shapes, item=item)
    cached = _CACHED_ACTIVATIONS * parts["activations"]
    if ranks > 1 and gathers_all:
        # Whole gradients are freed in one stream, and sharded ones allocated in another.
        cached += parts["gradients"]
    moved = {False: (), "optimizer": ("optimizer",), True: STATE}[trainer.cpu_offload]
    host = {name: parts.pop(name) for name in moved if name in parts}
    host["activations"] = num_tokens * activations.there
    return TrainerMemory(
        total=gpu_bytes,
        parts={name: size for name, size in parts.items() if size},
        host={name: size for name, size in host.items() if size},
        cached=cached,
    )


def sleeping_trainer_bytes(spec: RunSpec, config: PretrainedConfig) -> float:
    """Returns the bytes that a trainer keeps per GPU in the rollouts' turn: sent weights and context."""
    item = getattr(torch, spec.trainer.dtype).itemsize
    return _sent(spec, shapes_of(config), item=item) + _CONTEXT


def state_memory(spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int) -> float:
    """Returns the bytes of a trainer on each GPU between two steps: weights, optimizer and reference."""
    parts = trainer_memory(spec, config, gpu_bytes=gpu_bytes).parts
    return sum(parts.get(name, 0.0) for name in STATE if name != "gradients")


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Returns the bytes of all weights in a dtype, tied ones once."""
    return dtype.itemsize * _num_weights(shapes_of(config))


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by name."""
    return _shapes_of(_ConfigKey(config))


class _ConfigKey:
    """Key of a cache for a configuration, by identity; the configuration must not change afterwards.

    A plan of a whole run asks for one configuration thousands of times, and transformers copies it deeply
    each time.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConfigKey) and other.config is self.config


def _config_dict(config: PretrainedConfig) -> Mapping[str, Any]:
    return _cached_dict(_ConfigKey(config))


@lru_cache(maxsize=8)
def _cached_dict(key: _ConfigKey) -> Mapping[str, Any]:
    return key.config.to_dict()


@lru_cache(maxsize=8)
def _shapes_of(key: _ConfigKey) -> dict[str, tuple[int, ...]]:
    return _shapes_described(type(key.config), key.config.to_json_string(use_diff=False))  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _shapes_described(kind: type[PretrainedConfig], described: str) -> dict[str, tuple[int, ...]]:
    config = kind.from_dict(parse_config(described))
    model = build_model(config, dtype=torch.float32, device="meta")
    return {name: tuple(value.shape) for name, value in stored_tensors(model).items()}


def _num_weights(shapes: Mapping[str, tuple[int, ...]]) -> float:
    return float(sum(map(prod, shapes.values())))


def _has_mesh(trainer: TrainerSpec) -> bool:
    return trainer.world_size > 1 or trainer.dtype != "float32" or trainer.offloads_weights


def _sharded(trainer: TrainerSpec, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the number of weights that a rank holds between two passes.

    FSDP2 shards everything over data-parallel ranks. Tensor-parallel ranks divide layers, and each has its
    own shards of what is outside of them.
    """
    outside = sum(prod(shape) for name, shape in shapes.items() if ".layers." not in name)
    layers = _num_weights(shapes) - outside
    return (outside * trainer.tensor_parallel + layers) / trainer.stage_ranks


def _computed(trainer: TrainerSpec, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the number of weights that a rank computes with once its shards are gathered."""
    tensor = trainer.tensor_parallel
    return sum(
        prod(shape)
        / (tensor if ".layers." in name else 1)
        / (trainer.expert_parallel if f".{OF_EXPERTS}" in name else 1)
        for name, shape in shapes.items()
    )


def _gathered(
    trainer: TrainerSpec,
    config: PretrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    item: int,
) -> float:
    """Returns the bytes of gathered weights in the dtype of the pass: two layers, and what is outside."""
    outside = _outside(config)
    layer = (_computed(trainer, shapes) - outside) / config.get_text_config().num_hidden_layers
    return float(item * (outside + 2 * layer))


def _outside(config: PretrainedConfig) -> int:
    """Returns the number of weights outside the layers: embeddings and head."""
    shape: Any = config.get_text_config()
    return int(shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2))


def _max_micro_batch_tokens(spec: RunSpec) -> int:
    """Returns the max. tokens of a micro-batch on one rank: a longer sequence is a micro-batch by itself."""
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    own = -(-longest // spec.trainer.context_parallel)
    return max(spec.trainer.tokens_per_micro_batch, own)


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes that layers keep per token, at the peak."""

    here: float
    """Bytes on the GPU."""
    there: float = 0.0
    """Bytes in host memory."""


def _exchanged(
    trainer: TrainerSpec, config: PretrainedConfig, *, item: int, num_packs: int
) -> float:
    """Returns the bytes per token of states and gradients that a pipeline stage holds for others."""
    if trainer.pipeline_parallel == 1:
        return 0.0
    return 2.0 * item * float(config.get_text_config().hidden_size) * num_packs


def _activations(
    trainer: TrainerSpec, config: PretrainedConfig, *, item: int, layers: int, num_packs: int
) -> _Activations:
    """Returns the bytes per token.

    Args:
        layers: Layers of a rank.
        num_packs: Micro-batches whose activations it holds at once.
    """
    shape: Any = config.get_text_config()
    heads = int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads)
    # Heads are repeated until each rank that shares the pack has the same number.
    heads = lcm(heads, trainer.tensor_parallel * trainer.context_parallel)
    width = int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    heads = _QUERIES * int(shape.num_attention_heads) + _KEY_VALUES * heads
    attended = item * heads * width / trainer.tensor_parallel
    all_layers = int(shape.num_hidden_layers)
    attended *= num_attention_layers(_config_dict(shape)) / all_layers
    if (recurrent := recurrent_shape(_config_dict(shape))) is not None:
        # A recurrent layer keeps the inputs and outputs of its convolution and of its gates.
        kept_width = 2 * recurrent.channels + 2 * recurrent.width
        attended += recurrent.num_layers / all_layers * item * kept_width
    # The tokens of an expert are copied, and its output is weighted.
    attended += item * _copied(shape)
    eager = 0 if trainer.compile else 1
    inner = item * _feed_forward(shape) / trainer.tensor_parallel
    hidden = float(item * shape.hidden_size)
    whole = _HIDDENS * hidden + attended + (_FEED_FORWARD + eager) * inner
    whole += eager * _EAGER_NORMS * _FLOAT32 * shape.hidden_size
    recomputed = trainer.activation_checkpointing
    assert recomputed != "auto", "the caller chooses"
    if recomputed == "selective":
        kept = [_SELECTED_HIDDENS * hidden + attended + _SELECTED_FEED_FORWARD * inner] * layers
    else:
        kept = [
            hidden if recomputed and number % recomputed == 0 else whole for number in range(layers)
        ]
    kept *= num_packs
    # A layer that is recomputed temporarily has all of its activations.
    again = whole if recomputed else 0.0
    if not trainer.activation_offloading:
        return _Activations(sum(kept) + again)
    if recomputed == "selective" and not trainer.compile:
        return _Activations(sum(kept) + again, layers * hidden)
    return _Activations(min(layers, _LAYERS_HERE) * max(kept) + again, sum(kept))


def _feed_forward(shape: Any) -> float:
    """Returns the width of the feed-forward part that a token passes."""
    experts = num_experts(_config_dict(shape))
    if not experts:
        return float(shape.intermediate_size)
    shared = getattr(shape, "shared_expert_intermediate_size", None) or 0
    return float(shape.num_experts_per_tok * _expert_width(shape) + shared)


def _copied(shape: Any) -> float:
    """Returns the additional width that a mixture keeps per token."""
    if not num_experts(_config_dict(shape)):
        return 0.0
    return float(shape.num_experts_per_tok * (shape.hidden_size + _expert_width(shape)))


def _expert_width(shape: Any) -> int:
    return int(getattr(shape, "moe_intermediate_size", None) or shape.intermediate_size)


def _sent(spec: RunSpec, shapes: Mapping[str, tuple[int, ...]], *, item: int) -> float:
    """Returns the bytes of the copy that is sent to the rollouts."""
    if MODES[spec.weight_sync.mode].through_host:
        return 0.0
    trainer, weights = spec.trainer, _num_weights(shapes)
    if trainer.lora is not None and spec.sends_adapters:
        return _FLOAT32 * adapter_weights(shapes, trainer.lora) + _exported_bytes(spec)
    return item * weights / (trainer.stage_ranks if spec.sends_rows else 1) + _exported_bytes(spec)


def _exported_bytes(spec: RunSpec) -> int:
    """Returns the bytes of the shared buffer that a trainer exports to rollouts on its only GPU."""
    backend, num_here = spec.weight_sync.backend, spec.colocated_rollouts
    share_one = spec.trainer.world_size == 1 and 0 < num_here == spec.rollout.replicas
    return ROOM if backend == "handle" or (backend == "auto" and share_one) else 0
