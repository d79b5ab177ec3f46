"""Loads the models of a process, sharded over the processes of its worker, as fsdp engines.

A large model is sharded before it is loaded: meta device, adapters, distribution, memory for this rank's
shards, then their rows from the safetensors.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.common.memory.trainer import Stays, compiles_asleep, fitted, resident_memory
from services.common.models.loading import (
    build_model,
    check_free_memory,
    compute_frequencies,
    load_config,
    read_weights,
    stored_tensors,
)
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import TrainerSpec
from services.trainer.algorithm.centering import score_centering
from services.trainer.engines.base import EngineArgs, ModelRole, Progress, TrainEngine
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters, is_adapter, plain_name
from services.trainer.engines.fsdp.oom import load_oom_limits
from services.trainer.engines.fsdp.parallel import RankTopology, build_topology, distribute
from services.trainer.model.policy import (
    Critic,
    Policy,
    computes_as,
    freeze,
    freeze_tower,
    output_head,
)
from services.trainer.model.quantized import quantize_base, quantized_layers
from services.trainer.model.warm_start import base_folder, load_base_model
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_Module = TypeVar("_Module", Policy, Critic)


def build(args: EngineArgs) -> dict[ModelRole, TrainEngine]:
    """Loads the models. Blocks. All ranks must call it.

    Raises:
        ValueError: If a model does not load, cannot be trained, or does not fit into memory.
    """
    settings = args.settings
    topology = build_topology(
        args.spec.trainer, device=args.device, rank=settings.rank, world_size=settings.world_size
    )
    spec = fitted_to_gpu(args.spec, settings, device=topology.device)
    oom_limits = load_oom_limits(settings, spec.trainer, ranks=topology.data)
    loader = Loader(spec, settings, topology, args.progress)
    contents, may_compile = loader.memory_asleep()
    engines: dict[ModelRole, FsdpEngine] = {}
    for role in args.roles:
        module: Policy | Critic
        if role == "policy" and not spec.algorithm.loss_kind.trains_values:
            module = load_policy(loader, spec)
        elif role in ("policy", "critic"):
            module = loader.load(partial(_critic, spec))
        else:
            teacher = Loader(spec.of_reference, settings, topology, args.progress)
            module = teacher.load(_reference(spec))
        engines[role] = FsdpEngine(
            module,
            spec=spec,
            topology=topology,
            oom_limits=oom_limits,
            contents=contents,
            compiles_asleep=may_compile,
        )
    if "policy" in engines:
        teach(engines["policy"].module, engines.get("reference"), spec)
    return {**engines}


def teach(policy: Policy | Critic, reference: FsdpEngine | None, spec: RunSpec) -> None:
    """Gives a policy its teacher's output head to compare the whole vocabulary. All ranks must call it."""
    if spec.distillation is None or spec.distillation.top_k is not None or reference is None:
        return
    head = output_head(reference.module.model)
    weight = head.weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    # The teacher's own forward pass casts its weights to this dtype.
    weight = weight.to(getattr(torch, spec.trainer.dtype))
    policy.teacher_head = replace(head, weight=weight)


def _critic(spec: RunSpec, model: PreTrainedModel) -> Critic:
    freeze_tower(model, is_frozen=spec.trainer.freeze_vision_tower)
    return Critic(model)


def _reference(spec: RunSpec) -> Callable[[PreTrainedModel], Policy]:
    """Returns the function that makes the frozen reference: the policy's base, or a teacher."""

    def make(model: PreTrainedModel) -> Policy:
        is_policy = spec.teacher is None
        policy = Policy(
            model,
            temperature=spec.rollout.sampling.temperature,
            engine=computes_as(spec, model.config) if is_policy else None,
        )
        policy = freeze(policy)
        if is_policy:
            _quantize(policy, spec.trainer)
        return policy

    return make


def _quantize(policy: Policy, trainer: TrainerSpec) -> None:
    if trainer.lora is not None and trainer.lora.base_dtype is not None:
        dtype = getattr(torch, trainer.dtype)
        quantize_base(policy.model, trainer.lora.base_dtype, dtype=dtype)


def load_policy(loader: "Loader", spec: RunSpec) -> Policy:
    """Loads the policy to train, with its LoRA adapters."""

    def make(model: PreTrainedModel) -> Policy:
        policy = Policy(
            model,
            temperature=spec.rollout.sampling.temperature,
            routing_replay=spec.rollout.routing_replay,
            distill=spec.distillation,
            centering=score_centering(spec),
            engine=computes_as(spec, model.config),
        )
        freeze_tower(model, is_frozen=spec.trainer.freeze_vision_tower)
        if spec.trainer.lora is not None:
            add_adapters(model, spec.trainer.lora)
        _quantize(policy, spec.trainer)
        return policy

    policy = loader.load(make)
    begin_adapters(policy, seed=spec.seed)
    return policy


class Loader:
    """Loads models and shards them over the processes of a worker."""

    def __init__(
        self, spec: RunSpec, settings: TrainerSettings, topology: RankTopology, progress: Progress
    ) -> None:
        self._spec = spec
        self._topology = topology
        self._tokenizer = load_tokenizer(spec.model)
        self._source: dict[str, Any] = {
            "seed": spec.seed,
            "device": torch.device("cpu") if topology.mesh is not None else topology.device,
            "cache": settings.model_cache.expanduser(),
            "progress": progress,
        }

    def load(self, make: Callable[[PreTrainedModel], _Module]) -> _Module:
        """Loads a policy or critic on the base model, sharded over the processes.

        Trained parameters are float32; frozen ones have the dtype of the forward pass.

        Args:
            make: Wraps a model, whose weights may be loaded later, and freezes what is not trained.

        Raises:
            ValueError: If the model does not load or cannot be sharded.
        """
        module = self._loaded(make)
        # A rollout that takes turns on these GPUs starts only when this process sleeps.
        if self._spec.trainer.compile and not self._spec.topology.is_colocated:
            self._source["progress"]("compiling layers for all sizes of a micro-batch")
            compile_ahead(module, self._spec.trainer, device=self._topology.device)
        return module

    def _loaded(self, make: Callable[[PreTrainedModel], _Module]) -> _Module:
        model, trainer = self._spec.model, self._spec.trainer
        folder = None
        if self._topology.mesh is not None:
            folder = base_folder(model, self._tokenizer, **self._source)
        if folder is None:
            module = make(load_base_model(model, self._tokenizer, **self._source))
            self._cast_frozen(module)
            distribute(module, trainer, self._topology)
            return module
        # No rank ever holds the whole model.
        module = self._on_meta(make)
        device = torch.device("cpu") if trainer.offloads_weights else self._topology.device
        fill(module, folder, device=device)
        return module

    def shape(self, make: Callable[[PreTrainedModel], _Module]) -> _Module:
        """Builds a frozen policy without loading weights, sharded over the processes; see :meth:`load`."""
        device = self._topology.device
        if self._topology.mesh is None:
            config = load_config(self._spec.model, self._tokenizer)
            return make(build_model(config, dtype=self._computes_in, device=device))
        module = self._on_meta(make)
        materialize(module, device=device)
        return module

    def memory_asleep(self) -> tuple[Stays, bool]:
        """Returns the state that stays on a time-shared GPU, and True if layers compile during a sleep."""
        device, spec = self._topology.device, self._spec
        if device.type == "cpu":
            return "nothing", False
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        config = load_config(spec.model, self._tokenizer)
        contents = resident_memory(spec, config, gpu_bytes=gpu_bytes)
        return contents, spec.trainer.compile and compiles_asleep(
            spec, config, contents=contents, gpu_bytes=gpu_bytes
        )

    def _on_meta(self, make: Callable[[PreTrainedModel], _Module]) -> _Module:
        config = load_config(self._spec.model, self._tokenizer)
        module = make(build_model(config, dtype=torch.float32, device="meta"))
        self._cast_frozen(module)
        distribute(module, self._spec.trainer, self._topology)
        return module

    @property
    def _computes_in(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._spec.trainer.dtype)
        return dtype

    def _cast_frozen(self, module: nn.Module) -> None:
        """Casts frozen parameters to the forward dtype, but no buffers: rotary frequencies are float32."""
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self._computes_in)


def fitted_to_gpu(spec: RunSpec, settings: TrainerSettings, *, device: torch.device) -> RunSpec:
    """Resolves settings of a specification that depend on the GPUs, if there are any.

    Raises:
        ValueError: If the trainer cannot fit into memory; the message has the figures.
    """
    if device.type == "cpu":
        # The C++ of compiled layers takes many minutes to build, and saves little.
        changes: dict[str, Any] = {"compile": False}
        if spec.trainer.activation_checkpointing == "auto":
            changes["activation_checkpointing"] = False
        trainer = spec.trainer.model_copy(update=changes)
        return spec.model_copy(update={"trainer": trainer})
    config = load_config(spec.model, load_tokenizer(spec.model))
    if computes_as(spec, config) is not None:
        # Compiled layers would compute with other operators than the engine.
        trainer = spec.trainer.model_copy(update={"compile": False})
        spec = spec.model_copy(update={"trainer": trainer})
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    engines = 0 if spec.topology.is_colocated else settings.gpu_neighbours.count("rollout")
    fitted_spec, memory = fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    logger.info(
        "memory planned",
        extra={
            "table": memory.table(spec.trainer.world_size),
            "activation_checkpointing": str(fitted_spec.trainer.activation_checkpointing),
            "keep_gathered": fitted_spec.trainer.keeps_gathered,
        },
    )
    memory.check(spec.trainer.world_size)
    # Workers on the same GPUs may hold memory that they release before the first step.
    if spec.topology.placement == "disaggregated" and not settings.gpu_neighbours:
        check_free_memory(memory.used, device)
    return fitted_spec


def fill(module: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Allocates and loads the weights of a distributed policy or critic on the meta device, in place.

    Args:
        module: Holds a Hugging Face model as ``model``; its other parameters become 0; adapters stay unset.
        folder: Folder of the model, with safetensors.

    Raises:
        ValueError: If the folder does not hold the weights of the model.
    """
    materialize(module, device=device)
    model: Any = module.get_submodule("model")
    leaves = stored_tensors(model)
    for parameter in set(module.parameters()) - set(model.parameters()):
        nn.init.zeros_(parameter)
    base = {
        plain_name(name): leaf.detach() for name, leaf in leaves.items() if not is_adapter(name)
    }
    config = model.config.to_dict()
    read_weights(base, folder, config)
    for name, layer in quantized_layers(model).items():
        shape = layer.out_features, layer.in_features
        weight = torch.empty(shape, dtype=layer.scales.dtype, device=device)
        read_weights({plain_name(name): weight}, folder, config)
        layer.set_weight(weight)


def materialize(module: nn.Module, *, device: torch.device) -> None:
    """Allocates memory for the weights of a distributed policy or critic, in place.

    Args:
        module: Holds a Hugging Face model as ``model``, on the meta device.
    """
    module.to_empty(device=device)
    model: Any = module.get_submodule("model")
    model.tie_weights()
    compute_frequencies(model, device=device)
