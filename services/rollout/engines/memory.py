"""What each GPU of a rollout will hold, before anything is started: pure arithmetic.

The engine's own share ends where the weight plane's begins, so that the first update finds its room. Where an
engine has several GPUs, its weights, its KV cache and the shadow are divided among them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, prod
from typing import Any, Final, Self

import torch
from transformers import PretrainedConfig

from services.common.models.kv_memory import kv_bytes_per_token, most_kv_tokens
from services.common.models.training_memory import (
    SPARE,
    adapter_weights,
    shapes_of,
    trainer_memory,
    weight_bytes,
    weight_copies,
)
from services.common.models.turns_memory import resident_memory, sleeping_memory
from services.common.runspec.engines import EngineKind, engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import LoraSpec
from services.common.runspec.weight_modes import HOST_MODE, MODES
from services.rollout.frozen_weights import BUCKET_BYTES

_GB: Final = 1e9
# Driver contexts of the engine's process and of the one that receives, NCCL's buffers among them; and what an
# engine needs beside weights and KV cache: activations, CUDA graphs, the allocator's remainders.
_CONTEXTS: Final = 2.0e9
_WORKING: Final = 4.0e9
_LARGEST_SHARE: Final = 0.9
_BUCKET_BYTES: Final = 512 << 20
_SLOTS: Final = 2
_ADAPTER_BYTES: Final = 4
# Of the weight that is being merged: in its dtype as it was and as it gets, and in float32 as both.
_MERGED_BYTES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model in bytes."""

    weights: float
    """Of all parameters, tied ones once."""
    kv_per_token: int
    """Keys and values of one token, in all layers."""
    num_kv_heads: int
    """Of each layer: tensor parallelism cannot divide them further."""

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        """From the shape of a model."""
        text = config.get_text_config()
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        return cls(
            weights=weight_bytes(config, dtype),
            kv_per_token=kv_bytes_per_token(config, dtype),
            num_kv_heads=heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlane:
    """What the weight plane keeps on a rollout's GPUs."""

    num_copies: int
    """Shadow copies of all weights."""
    num_sources: int
    """Trainer ranks that send."""
    bucket_bytes: int
    """Bytes of one collective."""
    merging: float = 0.0
    """Bytes of adapters that come alone, and of what merging them takes."""

    @classmethod
    def of(cls, spec: RunSpec, config: PretrainedConfig) -> Self:
        """From a run's weight sync and the shape of its model."""
        sync, trainer = spec.weight_sync, spec.trainer
        if trainer.lora is not None and spec.sends_adapters:
            shapes = shapes_of(config)
            largest = max(
                (prod(shape) for name, shape in shapes.items() if _is_target(name, trainer.lora)),
                default=0,
            )
            adapters = _ADAPTER_BYTES * adapter_weights(shapes, trainer.lora)
            return cls(
                num_copies=0,
                num_sources=1,
                bucket_bytes=BUCKET_BYTES,
                merging=adapters + _MERGED_BYTES * largest,
            )
        is_whole = (
            sync.senders == "leader"
            or trainer.lora is not None
            or trainer.tensor_parallel > 1
            or trainer.expert_parallel not in (1, trainer.world_size)
        )
        num_sources = 1 if is_whole else trainer.world_size
        # Whole tensors beside the rows that came, where those are kept as they came.
        # NCCL sends nothing between processes of one GPU.
        mode = MODES[HOST_MODE if spec.topology.is_colocated else sync.mode]
        copies = 2 if mode.keeps_rows and num_sources > 1 else 1
        return cls(
            num_copies=0 if weight_copies(spec) == 1 else copies,
            num_sources=num_sources,
            bucket_bytes=sync.bucket_bytes or _BUCKET_BYTES,
        )

    @property
    def slot_bytes(self) -> int:
        """Room in which buckets travel, where they do not arrive in their place."""
        is_staged = self.num_copies == 0 or self.num_sources > 1
        return _SLOTS * self.num_sources * self.bucket_bytes if is_staged else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the GPU of a rollout that holds most: the one that receives."""

    num_gpus: int
    """GPUs of the rollout."""
    total: int
    """Memory of one."""
    weights: float
    """The engine's share of the model."""
    shadow: float
    """Its share of the shadow copies."""
    slots: float
    """Room in which buckets travel."""
    kv_per_token: float
    """Keys and values of one token."""
    others: float = 0.0
    """What other workers take of the same GPU."""
    most_kv_tokens: float = inf
    """Tokens of KV cache that are of use: where an engine takes turns, more would only take longer to map."""
    stays_awake: bool = False
    """Whether it keeps its memory in others' turns: there is room for all."""

    @property
    def plane(self) -> float:
        """What is kept free of the engine."""
        return self.shadow + self.slots + _CONTEXTS

    @property
    def engine_share(self) -> float:
        """Part of the memory that the engine may take, weights and KV cache and all, in steps of .01."""
        return min(_LARGEST_SHARE, floor(100 * (1 - (self.plane + self.others) / self.total)) / 100)

    @property
    def most_kv_cache(self) -> float:
        """What is left for keys and values; negative if there is no room."""
        return self.engine_share * self.total - self.weights - _WORKING

    @property
    def kv_cache(self) -> float:
        """What keys and values get of it."""
        return min(self.most_kv_cache, self.most_kv_tokens * self.kv_per_token)

    @property
    def wanted_share(self) -> float:
        """Part of the memory that it has to find free when it starts, in steps of .01."""
        needed = (self.weights + _WORKING + self.kv_cache) / self.total
        return min(self.engine_share, ceil(100 * needed) / 100)

    @property
    def used(self) -> float:
        """Bytes of the engine and of the weight plane."""
        return self.weights + _WORKING + self.kv_cache + self.plane

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return max(0, int(self.kv_cache / self.kv_per_token))

    def table(self) -> str:
        """What the GPU holds, line by line."""
        rows: Sequence[tuple[str, float]] = [
            ("engine: weights", self.weights),
            ("engine: activations, graphs", _WORKING),
            ("engine: KV cache", self.kv_cache),
            ("weight sync: shadow", self.shadow),
            ("weight sync: buckets", self.slots),
            ("contexts", _CONTEXTS),
            *([("other workers", self.others)] if self.others else []),
        ]
        rows = [*rows, ("left", self.total - sum(size for _, size in rows))]
        head = f"each of {self.num_gpus} GPU(s) of a rollout, of {self.total / _GB:.1f} GB"
        lines = [f"  {name:<28}{size / _GB:8.1f} GB" for name, size in rows]
        share = f"the engine may take {self.engine_share:.2f} of it, {self.kv_tokens} tokens of KV cache"
        return "\n".join([head, *lines, share])

    def check(self, *, most_tokens: int) -> None:
        """Refuse what cannot fit.

        Args:
            most_tokens: Of the longest prompt with the longest response.

        Raises:
            ValueError: With the figures, and what to change.
        """
        if self.kv_tokens < most_tokens:
            own = self.weights + _WORKING + self.plane + most_tokens * self.kv_per_token
            beside = (
                f"; {self.others / _GB:.1f} GB of it are of other workers" if self.others else ""
            )
            remedy = (
                "give the run more GPUs, lower trainer.tokens_per_micro_batch, or set trainer.cpu_offload"
                if self.others
                else "give the engine more GPUs (its tensor-parallel argument in rollout.engine_arguments), "
                "or shorten responses"
            )
            raise ValueError(
                f"the model does not fit: a GPU of the rollout has {self.total / _GB:.1f} GB, but "
                f"{(own + self.others) / _GB:.1f} GB are needed for one response of {most_tokens} tokens"
                f"{beside}; {remedy}.\n" + self.table()
            )


def _is_target(name: str, lora: LoraSpec) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in lora.target_modules


def plan_memory(
    model: ModelSize,
    plane: WeightPlane,
    *,
    gpu_bytes: int,
    kind: EngineKind,
    arguments: Mapping[str, Any],
    others: float = 0.0,
    most_kv_tokens: float = inf,
    stays_awake: bool = False,
) -> MemoryPlan:
    """Divide a model, its KV cache and the weight plane among the GPUs of one rollout.

    Args:
        model: Its size.
        plane: What weight sync needs.
        gpu_bytes: Memory of one GPU.
        kind: The engine.
        arguments: Of the engine; they say how it is divided.
        others: Bytes that other workers take of that GPU.
        most_kv_tokens: Tokens of KV cache that are of use.
        stays_awake: Whether the engine keeps its memory in others' turns.
    """
    num_gpus = kind.num_gpus(arguments)
    replicas = min(num_gpus, int(arguments.get(kind.replica_argument, 1)))
    parts = max(1, num_gpus // replicas)
    divided = max(1, min(parts, model.num_kv_heads * int(arguments.get(kind.stage_argument, 1))))
    return MemoryPlan(
        num_gpus=num_gpus,
        total=gpu_bytes,
        weights=model.weights / parts,
        shadow=plane.num_copies * model.weights / num_gpus,
        slots=plane.slot_bytes + plane.merging,
        kv_per_token=model.kv_per_token / divided,
        others=others,
        most_kv_tokens=most_kv_tokens,
        stays_awake=stays_awake,
    )


def memory_of_others(
    roles: Collection[str], spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int
) -> float:
    """Bytes that the other workers of a run take of a GPU which a rollout shares with them.

    Args:
        roles: Of the others, each once for each worker.
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of the GPU; what trainers leave of it is divided equally among rollouts.
    """
    size = ModelSize.of(config, getattr(torch, spec.trainer.dtype)).weights
    num_rollouts = 1 + sum(role == "rollout" for role in roles)
    taken = 0.0
    for role in roles:
        if role == "rollout":
            continue
        if role in {"trainer", "critic"}:
            taken += (
                sleeping_memory(spec, config, gpu_bytes=gpu_bytes)
                if spec.topology.is_colocated
                else SPARE
                * trainer_memory(spec, config, gpu_bytes=gpu_bytes, engines=num_rollouts).used
            )
        else:
            taken += size + _WORKING + _CONTEXTS
    return taken + max(0.0, gpu_bytes - taken) * (1 - 1 / num_rollouts)


def plan_of(
    spec: RunSpec,
    config: PretrainedConfig,
    *,
    gpu_bytes: int,
    roles: Collection[str] = (),
    checks: bool = True,
) -> MemoryPlan:
    """What a run's rollouts will hold on GPUs of a size.

    Args:
        spec: The run.
        config: Shape of its model.
        gpu_bytes: Memory of one GPU.
        roles: Of the other workers on a rollout's GPUs.
        checks: Whether what does not fit is refused.

    Raises:
        ValueError: If that does not fit, or an engine argument leaves too little.
    """
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    for name in kind.unplanned.keys() & arguments.keys():
        raise ValueError(
            f"rollout.engine_arguments.{name} is {arguments[name]}: what that takes of a GPU is not planned, "
            f"so weight sync may find no room; remove it, or set {kind.unplanned[name]} in its place"
        )
    is_in_turns = spec.topology.is_colocated and "trainer" in roles
    plan = plan_memory(
        ModelSize.of(config, getattr(torch, spec.trainer.dtype)),
        WeightPlane.of(spec, config),
        gpu_bytes=gpu_bytes,
        kind=kind,
        arguments=arguments,
        others=memory_of_others(roles, spec, config, gpu_bytes=gpu_bytes),
        most_kv_tokens=most_kv_tokens(spec, config) if is_in_turns else inf,
        stays_awake=is_in_turns and resident_memory(spec, config, gpu_bytes=gpu_bytes) == "all",
    )
    if not checks:
        return plan
    most_tokens = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    plan.check(most_tokens=min(most_tokens, int(config.max_position_embeddings)))
    engine_share(plan, kind, arguments)
    return plan


def engine_share(
    plan: MemoryPlan, kind: EngineKind, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments that keep an engine out of memory that is not its own; none of those that are given.

    An engine that measures what is free would take what others are about to: where it shares a GPU, its KV
    cache is given in bytes or tokens.

    Raises:
        ValueError: If what is given leaves too little.
    """
    share: dict[str, Any] = {}
    if kind.memory_argument is not None:
        share |= _checked_share(plan, kind, arguments)
    cache = kind.cache_argument
    if cache is not None and cache in arguments:
        _check_cache(
            plan, cache, arguments[cache] * (1 if kind.cache_in_bytes else plan.kv_per_token)
        )
    elif cache is not None and (plan.others or not kind.memory_argument):
        share[cache] = int(plan.kv_cache) if kind.cache_in_bytes else plan.kv_tokens
    return share


def _check_cache(plan: MemoryPlan, name: str, num_bytes: float) -> None:
    if num_bytes > plan.most_kv_cache:
        raise ValueError(
            f"rollout.engine_arguments.{name} takes {num_bytes / _GB:.1f} GB of a GPU, but beside weights "
            f"and weight sync {plan.most_kv_cache / _GB:.1f} of its {plan.total / _GB:.1f} GB are left; "
            "lower it, or leave it out\n" + plan.table()
        )


def _checked_share(
    plan: MemoryPlan, kind: EngineKind, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    name = kind.memory_argument
    assert name is not None
    excluded = _WORKING / plan.total if kind.memory_excludes_working else 0
    most, given = plan.engine_share - excluded, arguments.get(name)
    if given is None:
        # Such a share is of what is free by then, and the cache that is given bounds what is taken of it.
        is_bounded = kind.memory_excludes_working and plan.others
        return {name: _LARGEST_SHARE if is_bounded else round(plan.wanted_share - excluded, 2)}
    if given > most:
        beside = f" and other workers {plan.others / _GB:.1f}" if plan.others else ""
        raise ValueError(
            f"rollout.engine_arguments.{name} is {given}, but weight sync needs {plan.plane / _GB:.1f}"
            f"{beside} of {plan.total / _GB:.1f} GB: at most {most:.2f} is left; lower it, or leave it out\n"
            + plan.table()
        )
    return {}
