"""Plans the memory of each GPU of a rollout before anything starts. Pure arithmetic.

The engine's share of a GPU excludes what weight sync needs, so that the first update finds enough memory. On
several GPUs, the engine's weights, its KV cache and the shadow copies are divided among them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, prod
from typing import Any, Final, Self

from transformers import PretrainedConfig

from services.common.memory.sizes import (
    ModelSize,
    min_kv_tokens,
    num_sources,
    required_kv_tokens,
    sent_adapters,
    shapes_of,
    weight_bytes,
    weight_copies,
    wire_dtype,
)
from services.common.memory.trainer import resident_memory, sleeping_memory, trainer_memory
from services.common.models.adapters import adapted_weights
from services.common.runspec.engines import EngineKind, engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.weight_modes import BUCKET_BYTES as WHOLE_BUCKETS
from services.common.runspec.weight_modes import HOST_MODE, MODES, STAGING_SLOTS
from services.common.runspec.workers import WORKERS

_GB: Final = 1e9
# Driver contexts of the engine's process and of the receiving process, including NCCL's buffers.
_CONTEXTS: Final = 2.0e9
# Engine memory besides weights and KV cache: activations, CUDA graphs, allocator fragmentation.
_WORKING: Final = 4.0e9
_LARGEST_SHARE: Final = 0.9
# Fraction of a GPU that no plan uses: contexts and allocators of its processes take more than planned.
_FREE_SHARE: Final = 0.03
# Share of the KV cache for all slots with the longest responses that stays where adapters are merged ahead:
# without that memory, generation stops for several times as long at each version.
_KEPT_KV_SHARE: Final = 0.5
BUCKET_BYTES: Final = 128 << 20
"""Least bytes of the buckets in which adapters are merged into frozen weights."""
LARGEST_BUCKET_BYTES: Final = 2 << 30
# Bytes per element of the weight being merged: old and new in its dtype, and both in float32.
_MERGED_BYTES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlane:
    """Memory that weight sync keeps on a rollout's GPUs."""

    num_copies: int
    """Number of shadow copies of all weights."""
    num_sources: int
    """Number of trainer ranks that send."""
    bucket_bytes: int
    """Bytes of one collective."""
    merging: float = 0.0
    """Bytes of separately sent adapters and of the workspace that merges them."""
    merged_ahead: float = 0.0
    """Bytes of the weights that can be merged while the engine generates, if there is memory for them."""

    @classmethod
    def of(cls, spec: RunSpec, config: PretrainedConfig) -> Self:
        """Computes the memory from a run's weight sync and its model's configuration."""
        sync, lora, shapes = spec.weight_sync, spec.trainer.lora, shapes_of(config)
        adapters = sent_adapters(spec, shapes)
        if adapters is not None and lora is not None:
            largest = max(map(prod, adapted_weights(shapes, lora).values()), default=0)
            return cls(
                num_copies=0,
                num_sources=1,
                bucket_bytes=BUCKET_BYTES,
                merging=adapters + _MERGED_BYTES * largest,
                # An engine that sleeps generates nothing meanwhile, and needs its memory for the trainer.
                merged_ahead=0.0
                if spec.topology.is_colocated
                else weight_bytes(config, wire_dtype(spec)) + LARGEST_BUCKET_BYTES,
            )
        senders = num_sources(spec)
        # Modes that keep the received rows need a second copy for whole tensors. NCCL cannot send
        # between processes of one GPU, so colocated runs use the host mode.
        mode = MODES[HOST_MODE if spec.topology.is_colocated else sync.mode]
        copies = 2 if mode.keeps_rows and senders > 1 else 1
        return cls(
            num_copies=0 if weight_copies(spec) == 1 else copies,
            num_sources=senders,
            bucket_bytes=sync.staged_bucket_bytes(WHOLE_BUCKETS["cuda"], num_sources=senders),
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the staging slots for buckets that are not received in their final position."""
        is_staged = self.num_copies == 0 or self.num_sources > 1
        return STAGING_SLOTS * self.num_sources * self.bucket_bytes if is_staged else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory plan, in bytes, of the fullest GPU of a rollout: the one that receives weights."""

    num_gpus: int
    """Number of GPUs of the rollout."""
    total: int
    """Memory of one GPU."""
    weights: float
    """Weights of the engine on this GPU."""
    shadow: float
    """Shadow copies on this GPU."""
    slots: float
    """Staging slots for buckets, and the workspace for merging adapters and quantizing layers."""
    kv_per_token: float
    """Keys and values of one token."""
    merged_slots: float = 0.0
    """Further staging slots, for weights that are merged while the engine generates."""
    other_workers: float = 0.0
    """Memory of other workers on the same GPU."""
    kv_token_limit: float = inf
    """Max useful KV cache in tokens: beside a trainer, more only takes memory, and longer to map."""
    stays_awake: bool = False
    """True if the engine keeps its memory during the other side's turns, because all fits at once."""

    @property
    def plane(self) -> float:
        """Bytes reserved for weight sync and driver contexts."""
        return self.shadow + self.slots + self.merged_slots + _CONTEXTS

    @property
    def used(self) -> float:
        """Bytes of the engine and of weight sync."""
        return self.weights + _WORKING + self.kv_cache + self.plane

    @property
    def engine_share(self) -> float:
        """Max fraction of the GPU for the engine, including weights and KV cache, in steps of 0.01."""
        free_fraction = 1 - _FREE_SHARE - (self.plane + self.other_workers) / self.total
        return min(_LARGEST_SHARE, floor(100 * free_fraction) / 100)

    @property
    def max_kv_cache(self) -> float:
        """Max bytes for the KV cache; negative if the rest does not fit."""
        return self.engine_share * self.total - self.weights - _WORKING

    @property
    def kv_cache(self) -> float:
        """Bytes for the KV cache: the available memory, up to ``kv_token_limit``."""
        return min(self.max_kv_cache, self.kv_token_limit * self.kv_per_token)

    def wanted_share(self, kv_cache: float) -> float:
        """Returns the fraction of the GPU that must be free when the engine starts, in steps of 0.01.

        Args:
            kv_cache: Bytes for the KV cache.
        """
        needed_share = (self.weights + _WORKING + kv_cache) / self.total
        return min(self.engine_share, ceil(100 * needed_share) / 100)

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return max(0, int(self.kv_cache / self.kv_per_token))

    def with_merged_slots(self, num_bytes: float, *, kv_cache: float) -> Self:
        """Gives memory that the KV cache cannot use to slots for merged weights.

        Args:
            num_bytes: Max bytes of slots.
            kv_cache: Bytes of the KV cache that stay.
        """
        rounding = self.total / 100  # of the engine's share
        spare = min(num_bytes, self.max_kv_cache - kv_cache - rounding)
        return replace(self, merged_slots=max(0.0, spare))

    def table(self) -> str:
        rows: Sequence[tuple[str, float]] = [
            ("engine: weights", self.weights),
            ("engine: activations, graphs", _WORKING),
            ("engine: KV cache", self.kv_cache),
            ("weight sync: shadow", self.shadow),
            ("weight sync: buckets", self.slots + self.merged_slots),
            ("contexts", _CONTEXTS),
            *([("other workers", self.other_workers)] if self.other_workers else []),
        ]
        rows = [*rows, ("left", self.total - sum(size for _, size in rows))]
        head = f"each of a rollout's {self.num_gpus} GPU(s), with {self.total / _GB:.1f} GB"
        lines = [f"  {name:<28}{size / _GB:8.1f} GB" for name, size in rows]
        share = (
            f"the engine may use {self.engine_share:.2f} of it, {self.kv_tokens} tokens of KV cache"
        )
        return "\n".join([head, *lines, share])

    def check(self, *, most_tokens: int) -> None:
        """Refuses a plan without enough KV cache for one response.

        Args:
            most_tokens: Tokens of the longest prompt with the longest response.

        Raises:
            ValueError: With the figures and a remedy.
        """
        if self.kv_tokens < most_tokens:
            engine_bytes = self.weights + _WORKING + self.plane + most_tokens * self.kv_per_token
            beside = (
                f"; other workers use {self.other_workers / _GB:.1f} GB of it"
                if self.other_workers
                else ""
            )
            remedy = (
                "give the run more GPUs, lower trainer.tokens_per_micro_batch, or set trainer.cpu_offload"
                if self.other_workers
                else "give the engine more GPUs (its tensor-parallel argument in rollout.engine_arguments), "
                "or shorten responses"
            )
            raise ValueError(
                f"the model does not fit: a GPU of the rollout has {self.total / _GB:.1f} GB, but "
                f"{(engine_bytes + self.other_workers) / _GB:.1f} GB are needed for one response of "
                f"{most_tokens} tokens{beside}; {remedy}.\n" + self.table()
            )


def plan_memory(
    model: ModelSize,
    plane: WeightPlane,
    *,
    gpu_bytes: int,
    kind: EngineKind,
    arguments: Mapping[str, Any],
    other_workers: float = 0.0,
    kv_token_limit: float = inf,
    stays_awake: bool = False,
) -> MemoryPlan:
    """Divides a model, its KV cache and the memory of weight sync among the GPUs of one rollout.

    Args:
        arguments: Arguments of the engine, which determine how the model is divided.
        other_workers: Bytes of other workers on that GPU.
        kv_token_limit: Max useful size of the KV cache in tokens.
        stays_awake: True if the engine keeps its memory during the other side's turns.
    """
    num_gpus = kind.num_gpus(arguments)
    replicas = min(num_gpus, int(arguments.get(kind.replica_argument, 1)))
    gpus_per_replica = max(1, num_gpus // replicas)
    divided = max(
        1, min(gpus_per_replica, model.num_kv_heads * int(arguments.get(kind.stage_argument, 1)))
    )
    return MemoryPlan(
        num_gpus=num_gpus,
        total=gpu_bytes,
        weights=model.weights / gpus_per_replica,
        shadow=plane.num_copies * model.sent_weights / num_gpus,
        slots=plane.slot_bytes + plane.merging + model.quantizing,
        kv_per_token=model.kv_per_token / divided,
        other_workers=other_workers,
        kv_token_limit=kv_token_limit,
        stays_awake=stays_awake,
    )


def other_workers_bytes(
    roles: Collection[str], spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int
) -> float:
    """Computes the bytes that a run's other workers use on a GPU shared with a rollout.

    Args:
        roles: Roles of the other workers, one entry per worker.
        gpu_bytes: Memory of the GPU; rollouts divide equally what trainers leave.
    """
    size = weight_bytes(config, wire_dtype(spec))
    num_rollouts = 1 + sum(role == "rollout" for role in roles)
    other_bytes = 0.0
    for role in roles:
        if role == "rollout":
            continue
        if WORKERS[role].trains:
            other_bytes += (
                sleeping_memory(spec, config, gpu_bytes=gpu_bytes)
                if spec.topology.is_colocated
                else trainer_memory(
                    spec, config, gpu_bytes=gpu_bytes, engines=num_rollouts
                ).reserved
            )
        else:
            other_bytes += size + _WORKING + _CONTEXTS
    return other_bytes + max(0.0, gpu_bytes - other_bytes) * (1 - 1 / num_rollouts)


def plan_of(
    spec: RunSpec,
    config: PretrainedConfig,
    *,
    gpu_bytes: int,
    roles: Collection[str] = (),
    checks: bool = True,
) -> MemoryPlan:
    """Plans the memory of a run's rollouts on GPUs of a given size.

    Args:
        roles: Roles of the other workers on a rollout's GPUs.
        checks: True to refuse a plan that does not fit.

    Raises:
        ValueError: If the plan does not fit, or an engine argument leaves too little memory.
    """
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    for name in kind.unplanned.keys() & arguments.keys():
        raise ValueError(
            f"rollout.engine_arguments.{name} is {arguments[name]}, whose GPU memory is not planned, "
            f"so weight sync may lack memory; remove it, or set {kind.unplanned[name]} instead"
        )
    is_shared = "trainer" in roles
    is_in_turns = spec.topology.is_colocated and is_shared
    plane = WeightPlane.of(spec, config)
    plan = plan_memory(
        ModelSize.of(config, spec),
        plane,
        gpu_bytes=gpu_bytes,
        kind=kind,
        arguments=arguments,
        other_workers=other_workers_bytes(roles, spec, config, gpu_bytes=gpu_bytes),
        kv_token_limit=required_kv_tokens(spec, config) if is_shared else inf,
        stays_awake=is_in_turns and resident_memory(spec, config, gpu_bytes=gpu_bytes) == "all",
    )
    if not {kind.memory_argument, kind.cache_argument} & arguments.keys():
        tokens = max(_KEPT_KV_SHARE * required_kv_tokens(spec, config), min_kv_tokens(spec, config))
        kv_cache = tokens * plan.kv_per_token
        plan = plan.with_merged_slots(plane.merged_ahead, kv_cache=kv_cache)
    if not checks:
        return plan
    most_tokens = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    plan.check(most_tokens=min(most_tokens, int(config.max_position_embeddings)))
    engine_share(plan, kind, arguments)
    return plan


def engine_share(
    plan: MemoryPlan, kind: EngineKind, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the arguments that limit the engine's memory to its share, without those already given.

    An engine that measures free memory would claim what other workers are about to use. On a shared
    GPU, its KV cache is therefore set in bytes or tokens.

    Raises:
        ValueError: If a given argument leaves too little memory.
    """
    share: dict[str, Any] = {}
    if kind.memory_argument is not None:
        share |= _checked_share(plan, kind, arguments)
    cache = kind.cache_argument
    if cache is not None and cache in arguments:
        _check_cache(
            plan, cache, arguments[cache] * (1 if kind.cache_in_bytes else plan.kv_per_token)
        )
    elif cache is not None and (plan.other_workers or not kind.memory_argument):
        share[cache] = int(plan.kv_cache) if kind.cache_in_bytes else plan.kv_tokens
    return share


def needed_bytes(plan: MemoryPlan, kind: EngineKind, arguments: Mapping[str, Any]) -> float:
    """Returns the bytes of a GPU that an engine with these arguments and its weight sync need."""
    share = arguments.get(kind.memory_argument) if kind.memory_argument is not None else None
    if share is None:
        return plan.used
    return float(share) * plan.total + plan.plane + kind.memory_excludes_working * _WORKING


def _check_cache(plan: MemoryPlan, name: str, num_bytes: float) -> None:
    if num_bytes > plan.max_kv_cache:
        raise ValueError(
            f"rollout.engine_arguments.{name} takes {num_bytes / _GB:.1f} GB of a GPU, but weights "
            f"and weight sync leave only {plan.max_kv_cache / _GB:.1f} of its {plan.total / _GB:.1f} GB; "
            "lower or remove it\n" + plan.table()
        )


def _checked_share(
    plan: MemoryPlan, kind: EngineKind, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    name = kind.memory_argument
    assert name is not None
    excluded = _WORKING / plan.total if kind.memory_excludes_working else 0
    maximum, configured_share = plan.engine_share - excluded, arguments.get(name)
    if configured_share is None:
        # This fraction refers to the memory that is free when the engine starts; the explicit KV cache
        # size bounds the use.
        is_bounded = kind.memory_excludes_working and plan.other_workers
        cache_bytes = arguments.get(kind.cache_argument or "") if kind.cache_in_bytes else None
        wanted_share = plan.wanted_share(plan.kv_cache if cache_bytes is None else cache_bytes)
        return {name: _LARGEST_SHARE if is_bounded else round(wanted_share - excluded, 2)}
    if configured_share > maximum:
        beside = f" and other workers {plan.other_workers / _GB:.1f}" if plan.other_workers else ""
        raise ValueError(
            f"rollout.engine_arguments.{name} is {configured_share}, but weight sync needs "
            f"{plan.plane / _GB:.1f}{beside} of {plan.total / _GB:.1f} GB, which leaves at most "
            f"{maximum:.2f}; lower or remove it\n" + plan.table()
        )
    return {}


def divide_slots(num_bytes: int) -> tuple[int, int]:
    """Returns the bytes of a bucket and the number of slots for a given size of all slots.

    Each bucket costs the engine's workers a command, so buckets are larger if there is memory.
    """
    bucket_bytes = min(max(BUCKET_BYTES, num_bytes // (2 * STAGING_SLOTS)), LARGEST_BUCKET_BYTES)
    return bucket_bytes, max(STAGING_SLOTS, num_bytes // bucket_bytes)
