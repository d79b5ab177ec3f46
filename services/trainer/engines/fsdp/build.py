"""Loads the models of a process, sharded over the processes of its worker, as fsdp engines."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.models.training_memory import fitted, trainer_memory
from services.common.models.turns_memory import Stays, resident_memory
from services.common.runspec.run import RunSpec
from services.trainer.engines.base import EngineOrder, ModelRole, Progress, TrainEngine
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.oom import recall
from services.trainer.engines.fsdp.parallel import RankTopology, build_topology, distribute
from services.trainer.engines.fsdp.sharded import fill, materialize
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.model.warm_start import base_folder, load_base_model
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_Module = TypeVar("_Module", Policy, Critic)


def build(order: EngineOrder) -> dict[ModelRole, TrainEngine]:
    """Loads the models. Blocks. All ranks must call it.

    Raises:
        ValueError: If a model does not load, cannot be trained, or does not fit into memory.
    """
    settings = order.settings
    topology = build_topology(
        order.spec.trainer,
        device=order.device,
        rank=settings.rank,
        world_size=settings.world_size,
    )
    spec = fitted_to_gpu(order.spec, settings, device=topology.device)
    oom_limits = recall(settings, spec.trainer, ranks=topology.data)
    loader = Loader(spec, settings, topology, order.progress)
    stays = loader.resident_memory()
    engines: dict[ModelRole, TrainEngine] = {}
    for role in order.roles:
        module: Policy | Critic
        if role == "policy":
            module = load_policy(loader, spec)
        elif role == "critic":
            module = loader.load(Critic)
        else:
            teacher = Loader(spec.of_reference, settings, topology, order.progress)
            module = teacher.load(_frozen(spec.rollout.sampling.temperature))
        engines[role] = FsdpEngine(
            module, spec=spec, topology=topology, oom_limits=oom_limits, stays=stays
        )
    return engines


def _frozen(temperature: float) -> Callable[[PreTrainedModel], Policy]:
    return lambda model: freeze(Policy(model, temperature=temperature))


def load_policy(loader: "Loader", spec: RunSpec) -> Policy:
    """Loads the policy to train, with its LoRA adapters."""

    def make(model: PreTrainedModel) -> Policy:
        policy = Policy(
            model,
            temperature=spec.rollout.sampling.temperature,
            routing_replay=spec.rollout.routing_replay,
        )
        if spec.trainer.lora is not None:
            add_adapters(model, spec.trainer.lora)
        return policy

    policy = loader.load(make)
    begin_adapters(policy, seed=spec.seed)
    return policy


class Loader:
    """Loads models and shards them over the processes of a worker.

    Args:
        spec: The run.
        settings: Settings of this process.
        topology: Parallelism of the worker's processes.
        progress: Called with the progress of a warm start.
    """

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
        if self._spec.trainer.compile:
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

    def resident_memory(self) -> Stays:
        """Returns what stays on a GPU that is time-shared with others."""
        device = self._topology.device
        if device.type == "cpu":
            return "nothing"
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        config = load_config(self._spec.model, self._tokenizer)
        return resident_memory(self._spec, config, gpu_bytes=gpu_bytes)

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
    """Resolves settings of a specification that depend on the size of the GPUs.

    Raises:
        ValueError: If the trainer cannot fit into memory; the message has the figures.
    """
    if device.type == "cpu":
        keeps = {"activation_checkpointing": False}
        is_open = spec.trainer.activation_checkpointing == "auto"
        trainer = spec.trainer.model_copy(update=keeps if is_open else {})
        return spec.model_copy(update={"trainer": trainer})
    config = load_config(spec.model, load_tokenizer(spec.model))
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    engines = 0 if spec.topology.is_colocated else settings.gpu_neighbours.count("rollout")
    memory = trainer_memory(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    chosen = fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    logger.info(
        "memory planned",
        extra={
            "table": memory.table(spec.trainer.world_size),
            "activation_checkpointing": str(chosen.trainer.activation_checkpointing),
        },
    )
    memory.check(spec.trainer.world_size)
    return chosen
