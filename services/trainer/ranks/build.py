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
from services.trainer.model.critic import CriticRunner
from services.trainer.model.lora import add_adapters
from services.trainer.model.parallel import Topology, build_topology, distribute
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.model.warm_start import Progress, load_base_model
from services.trainer.ranks.rank import Fetch, Rank
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepRunner
from services.trainer.weights import WeightExport


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded rank."""

    rank: Rank
    weights: WeightExport
    step: int
    """Newest trained step: 0, or that of the checkpoint that training resumes from."""


def build_rank(
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    fetch: Fetch,
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
    if spec.algorithm.advantage == "gae":
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
    checkpointer = Checkpointer(
        runner.parts(),
        root=checkpoint_root(spec, settings),
        keep=spec.trainer.checkpoint.keep,
        topology=topology,
    )
    rank = Rank(
        runner,
        fetch=fetch,
        spec=spec,
        ranks=topology.data,
        cost=cost,
        checkpointer=checkpointer,
    )
    weights = WeightExport(
        policy,
        dtype=getattr(torch, spec.trainer.dtype),
        device=topology.device,
        senders=spec.weight_sync.senders,
        lora_sync="merged" if spec.trainer.lora is None else spec.trainer.lora.sync,
    )
    # A checkpoint of this very run is there if its trainer was lost before: then training goes on from it.
    is_continued = settings.resume or any(checkpoint_root(spec, settings).glob(f"{STEP_PREFIX}*"))
    start_from = spec.trainer.checkpoint.start_from
    step = 0
    if is_continued:
        step = rank.restore()
    elif start_from is not None:
        step = rank.restore(Path(start_from))
    return Built(rank=rank, weights=weights, step=step)


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
