"""From a run's specification to a rank that can train."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.spec.run import RunSpec
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.checkpoint.manifest import STEP_PREFIX
from services.trainer.critic.runner import CriticRunner
from services.trainer.critic.step import CriticStepRunner
from services.trainer.critic.values import Values
from services.trainer.model.lora import add_adapters
from services.trainer.model.parallel import Topology, build_topology, distribute
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.model.warm_start import Progress, load_base_model
from services.trainer.ranks.rank import Rank, Runner
from services.trainer.ranks.transfers import Fetch, Transfers
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepRunner
from services.trainer.weights import WeightExport

_CRITIC = "critic"
"""Folder of the critic's checkpoints among those of the run."""


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded rank."""

    rank: Rank
    weights: WeightExport
    step: int
    """Newest trained step: 0, or that of the checkpoint that training resumes from."""


@dataclass(frozen=True, slots=True)
class BuiltCritic:
    """A loaded rank of a critic."""

    rank: Rank
    values: Values
    step: int
    """As in :class:`Built`."""


def build_rank(
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    transfers: Transfers,
    progress: Progress,
) -> Built:
    """Load the model and everything around it. Blocks; runs in a thread. All ranks call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        NotFoundError: If training is to resume and there is no whole checkpoint.
    """
    tokenizer = load_tokenizer(spec.model)
    topology = build_topology(
        spec.trainer,
        device=device_of(settings),
        rank=settings.rank,
        world_size=settings.world_size,
    )

    def load() -> Policy:
        return _load_policy(spec, settings, topology, tokenizer, progress)

    policy = load()
    if spec.trainer.lora is not None:
        add_adapters(policy.model, spec.trainer.lora)
    cost = sequence_cost(policy)
    distribute(policy, spec.trainer, topology)
    reference = None
    if spec.needs_reference and not spec.topology.own_gpus("ref_logp"):
        reference = load()
        freeze(reference)
        distribute(reference, spec.trainer, topology)
    critic = None
    if spec.algorithm.advantage == "gae" and not spec.topology.own_gpus("critic"):
        module = Critic(load().model)
        distribute(module, spec.trainer, topology)
        critic = CriticRunner(module, spec=spec, ranks=topology.data, device=topology.device)
    runner = StepRunner(
        policy,
        reference=reference,
        critic=critic,
        spec=spec,
        ranks=topology.data,
        device=topology.device,
    )
    root = checkpoint_root(spec, settings)
    rank = _rank(runner, root, fetch=transfers.fetch, spec=spec, topology=topology, cost=cost)
    weights = WeightExport(
        policy,
        dtype=getattr(torch, spec.trainer.dtype),
        device=topology.device,
        senders=spec.weight_sync.senders,
        lora_sync="merged" if spec.trainer.lora is None else spec.trainer.lora.sync,
    )
    start_from = spec.trainer.checkpoint.start_from
    step = _resume(rank, root, Path(start_from) if start_from else None, settings)
    return Built(rank=rank, weights=weights, step=step)


def build_critic(
    spec: RunSpec, settings: TrainerSettings, *, transfers: Transfers, progress: Progress
) -> BuiltCritic:
    """Load the critic, where it has processes of its own. Blocks; runs in a thread. All ranks call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        NotFoundError: If training is to resume and there is no whole checkpoint.
    """
    size = {"world_size": spec.topology.own_gpus("critic"), "tensor_parallel": 1}
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=size)})
    topology = build_topology(
        spec.trainer,
        device=device_of(settings),
        rank=settings.rank,
        world_size=settings.world_size,
    )
    policy = _load_policy(spec, settings, topology, load_tokenizer(spec.model), progress)
    cost = sequence_cost(policy)
    module = Critic(policy.model)
    distribute(module, spec.trainer, topology)
    critic = CriticRunner(module, spec=spec, ranks=topology.data, device=topology.device)
    runner = CriticStepRunner(critic, spec=spec, ranks=topology.data)
    root = checkpoint_root(spec, settings) / _CRITIC
    rank = _rank(runner, root, fetch=transfers.fetch, spec=spec, topology=topology, cost=cost)
    values = Values(
        critic,
        fetch=transfers.fetch,
        add=transfers.add,
        ranks=topology.data,
        cost=cost,
        max_tokens=spec.trainer.tokens_per_micro_batch,
    )
    start_from = spec.trainer.checkpoint.start_from
    folder = Path(start_from).parent / _CRITIC / Path(start_from).name if start_from else None
    return BuiltCritic(rank=rank, values=values, step=_resume(rank, root, folder, settings))


def _rank(
    runner: Runner,
    root: Path,
    *,
    fetch: Fetch,
    spec: RunSpec,
    topology: Topology,
    cost: Callable[[int], float],
) -> Rank:
    keep = spec.trainer.checkpoint.keep
    checkpointer = Checkpointer(runner.parts(), root=root, keep=keep, topology=topology)
    return Rank(
        runner, fetch=fetch, spec=spec, ranks=topology.data, cost=cost, checkpointer=checkpointer
    )


def _resume(rank: Rank, root: Path, start_from: Path | None, settings: TrainerSettings) -> int:
    """Load what training goes on from; returns its step.

    A checkpoint of this very run is there if its worker was lost before, and goes first.
    """
    if settings.resume or any(root.glob(f"{STEP_PREFIX}*")):
        return rank.restore()
    return rank.restore(start_from) if start_from is not None else 0


def checkpoint_root(spec: RunSpec, settings: TrainerSettings) -> Path:
    """Folder of the run's checkpoints."""
    directory = spec.trainer.checkpoint.directory
    return Path(directory) if directory else settings.state_directory / "checkpoints"


def _load_policy(
    spec: RunSpec,
    settings: TrainerSettings,
    topology: Topology,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Policy:
    model = load_base_model(
        spec.model,
        tokenizer,
        seed=spec.seed,
        device=torch.device("cpu") if topology.mesh is not None else topology.device,
        cache=settings.model_cache.expanduser(),
        progress=progress,
    )
    return Policy(model, temperature=spec.rollout.sampling.temperature)


def device_of(settings: TrainerSettings) -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", settings.local_rank)


def sequence_cost(policy: Policy) -> Callable[[int], float]:
    """Relative cost of a sequence by its length: linear layers, and attention with its square.

    Per token a forward pass takes about ``2 P`` operations in the ``P`` weights of the layers, and
    ``2 n h`` in the ``n`` attention layers of width ``h`` for each earlier token, half of the length.
    """
    config: Any = policy.model.config
    weights = sum(p.numel() for name, p in policy.named_parameters() if ".layers." in name)
    width = config.num_hidden_layers * config.hidden_size
    return lambda length: length * (1.0 + length * width / (2.0 * weights))
