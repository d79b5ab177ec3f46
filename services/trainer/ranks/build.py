"""Builds a rank that can train from a run's specification."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from services.common.models.loading import build_model, load_config
from services.common.models.teachers import check_teacher
from services.common.models.tokenizer import load_tokenizer
from services.common.models.training_memory import fitted, trainer_memory
from services.common.models.turns_memory import Stays, resident_memory
from services.common.runspec.run import RunSpec
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.checkpoint.manifest import STEP_PREFIX
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.host_copy import OffloadedState
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.oom import recall
from services.trainer.engines.fsdp.parallel import (
    RankTopology,
    build_topology,
    distribute,
)
from services.trainer.engines.fsdp.sharded import fill, materialize
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.flops import active_weights
from services.trainer.model.local_parts import local_part
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.model.warm_start import Progress, base_folder, load_base_model
from services.trainer.ranks.rank import Rank, Runner, StepProfiler
from services.trainer.ranks.training_recorder import TrainingRecorder
from services.trainer.settings import TrainerSettings
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.critic_step import CriticStepRunner
from services.trainer.steps.fields import FieldScoring
from services.trainer.steps.step import StepRunner
from services.trainer.transfers import QueueTransfers, of_vocabulary

logger = logging.getLogger(__name__)

_Module = TypeVar("_Module", Policy, Critic)
_CRITIC = "critic"
"""Subfolder of the critic's checkpoints and profiles."""


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded rank of a policy trainer."""

    rank: Rank
    weights: WeightExport
    state: OffloadedState
    step: int
    """Newest trained step: 0, or the step of the checkpoint that training resumes from."""


@dataclass(frozen=True, slots=True)
class BuiltCritic:
    """A loaded rank of a critic."""

    rank: Rank
    values: FieldScoring
    step: int
    """Newest trained step, as in :class:`Built`."""


def build_rank(
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    transfers: QueueTransfers,
    progress: Progress,
) -> Built:
    """Loads the policy, its reference and critic if needed, and the newest checkpoint.

    Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        NotFoundError: If training must resume and there is no complete checkpoint.
    """
    topology = build_topology(
        spec.trainer,
        device=device_of(settings),
        rank=settings.rank,
        world_size=settings.world_size,
    )
    spec = fitted_to_gpu(spec, settings, device=topology.device)
    loader = Loader(spec, settings, topology, progress)
    oom_limits = recall(settings, spec.trainer, ranks=topology.data)
    policy = load_policy(loader, spec)
    cost = sequence_cost(policy)
    reference = None
    if spec.needs_reference and not spec.topology.own_gpus("ref_logp"):
        temperature = spec.rollout.sampling.temperature
        check_teacher(spec)
        teacher = Loader(spec.of_reference, settings, topology, progress)
        reference = teacher.load(lambda model: freeze(Policy(model, temperature=temperature)))
    critic = None
    if spec.algorithm.advantage_kind.needs_critic and not spec.topology.own_gpus("critic"):
        module = loader.load(Critic)
        critic = CriticRunner(
            module, spec=spec, ranks=topology.data, device=topology.device, oom_limits=oom_limits
        )
    runner = StepRunner(
        policy,
        reference=reference,
        critic=critic,
        spec=spec,
        ranks=topology.data,
        device=topology.device,
        oom_limits=oom_limits,
    )
    root = checkpoint_root(spec, settings)
    fetch = of_vocabulary(transfers.fetch, policy.model.config.vocab_size)
    is_recorded = spec.samples.is_on and topology.is_first_of_pack
    recorder = TrainingRecorder(transfers.store_records, spec) if is_recorded else None
    if recorder is not None:
        runner.set_trained_callback(recorder.take)
    frozen = [] if reference is None else [reference]
    state = _state(runner, frozen, topology, stays=loader.resident_memory())
    rank = Rank(
        runner,
        fetch=fetch,
        spec=spec,
        ranks=topology.data,
        cost=cost,
        checkpointer=_checkpointer(runner, root, spec=spec, topology=topology, state=state),
        profiler=_profiler("profiles", spec, settings),
        recorder=recorder,
    )
    weights = WeightExport(
        policy,
        dtype=getattr(torch, spec.trainer.dtype),
        device=topology.device,
        ranks=topology.sharding,
        senders=spec.weight_sync.senders,
        sends_adapters=spec.sends_adapters,
    )
    start_from = spec.trainer.checkpoint.start_from
    step = _resume(rank, root, Path(start_from) if start_from else None, settings)
    return Built(rank=rank, weights=weights, state=state, step=step)


def build_critic(
    spec: RunSpec, settings: TrainerSettings, *, transfers: QueueTransfers, progress: Progress
) -> BuiltCritic:
    """Loads a critic that has its own processes. Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        NotFoundError: If training must resume and there is no complete checkpoint.
    """
    gpus = spec.topology.own_gpus("critic")
    size = {"world_size": gpus, "tensor_parallel": 1, "expert_parallel": 1, "context_parallel": 1}
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=size)})
    topology = build_topology(
        spec.trainer,
        device=device_of(settings),
        rank=settings.rank,
        world_size=settings.world_size,
    )
    spec = fitted_to_gpu(spec, settings, device=topology.device)
    module = Loader(spec, settings, topology, progress).load(Critic)
    cost = sequence_cost(module)
    oom_limits = recall(settings, spec.trainer, ranks=topology.data)
    critic = CriticRunner(
        module, spec=spec, ranks=topology.data, device=topology.device, oom_limits=oom_limits
    )
    runner = CriticStepRunner(critic, spec=spec, ranks=topology.data)
    root = checkpoint_root(spec, settings) / _CRITIC
    fetch = of_vocabulary(transfers.fetch, module.model.config.vocab_size)
    profiler = _profiler(f"profiles/{_CRITIC}", spec, settings)
    rank = Rank(
        runner,
        fetch=fetch,
        spec=spec,
        ranks=topology.data,
        cost=cost,
        checkpointer=_checkpointer(runner, root, spec=spec, topology=topology),
        profiler=profiler,
    )
    values = FieldScoring(
        "values",
        critic.values,
        fetch=fetch,
        add=transfers.add,
        ranks=topology.data,
        cost=cost,
        shares_prefixes=spec.shares_prefixes,
        oom_limits=oom_limits,
    )
    start_from = spec.trainer.checkpoint.start_from
    folder = Path(start_from).parent / _CRITIC / Path(start_from).name if start_from else None
    return BuiltCritic(rank=rank, values=values, step=_resume(rank, root, folder, settings))


def _state(
    runner: Runner, frozen: Sequence[Policy], topology: RankTopology, *, stays: Stays
) -> OffloadedState:
    """Returns the state that moves to host memory during turns of other processes.

    ``stays`` names what can remain because the GPU has room for both sides.
    """
    modules, optimizers = zip(*runner.parts().values(), strict=True)
    return OffloadedState([*modules, *frozen], optimizers, device=topology.device, stays=stays)


def _checkpointer(
    runner: Runner,
    root: Path,
    *,
    spec: RunSpec,
    topology: RankTopology,
    state: OffloadedState | None = None,
) -> Checkpointer:
    read = local_part if state is None else state.read
    keep = spec.trainer.checkpoint.keep
    return Checkpointer(
        runner.parts(),
        root=root,
        keep=keep,
        topology=topology,
        read=read,
        # Built again on another machine, a preset's frozen weights may differ.
        saves_frozen=spec.model.is_tiny,
    )


def _profiler(folder: str, spec: RunSpec, settings: TrainerSettings) -> StepProfiler:
    steps = frozenset(spec.trainer.profile_steps)
    return StepProfiler(settings.state_directory / folder, rank=settings.rank, steps=steps)


def _resume(rank: Rank, root: Path, start_from: Path | None, settings: TrainerSettings) -> int:
    """Loads the checkpoint that training resumes from; returns its step, or 0 if there is none.

    A checkpoint of this run exists if its worker was lost before; it takes precedence over ``start_from``.
    """
    if settings.resume or any(root.glob(f"{STEP_PREFIX}*")):
        return rank.restore()
    return rank.restore(start_from) if start_from is not None else 0


def checkpoint_root(spec: RunSpec, settings: TrainerSettings) -> Path:
    """Returns the folder of the run's checkpoints."""
    directory = spec.trainer.checkpoint.directory
    return Path(directory) if directory else settings.state_directory / "checkpoints"


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


def device_of(settings: TrainerSettings) -> torch.device:
    """Returns the device of this process: its own GPU, or the CPU."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", settings.local_rank)


def gpu_names() -> list[str]:
    """Returns the GPUs that this process sees, in the form that ``CUDA_VISIBLE_DEVICES`` accepts anywhere."""
    devices = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]


def sequence_cost(policy: Policy | Critic) -> Callable[[int], float]:
    """Returns a function from a sequence's length to its relative cost: linear layers plus attention.

    For each token, a forward pass takes about ``2 P`` operations in the ``P`` weights of the layers, and
    ``2 n h`` in the ``n`` attention layers of width ``h`` for each earlier token, half of the length on
    average.
    """
    config: Any = policy.model.config
    weights = active_weights(policy, config)
    width = config.num_hidden_layers * config.hidden_size
    return lambda length: length * (1.0 + length * width / (2.0 * weights))
