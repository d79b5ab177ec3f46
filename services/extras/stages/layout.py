"""Position of a process among pipeline stages, and the parts of a model that its stage has.

mesh   stages x dp x tp; FSDP2 shards a stage over dp, tensor-parallel ranks share its layers. A rank's number
       is its position in this mesh, so the ranks of a stage follow one another. Context-parallel ranks are
       neighbours in dp, and those that share experts in dp x tp
stage  consecutive layers; the first stage also has the embedding, the last one the final norm and the head
tied   if the head is the embedding, both the first and the last stage hold it, and add their gradients
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel

from services.common.models.loading import stored_buffers, stored_tensors
from services.common.models.stages import head_in_layers, stage_layers, stages_of
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.context import ContextRanks
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.parallel import RankTopology, use_few_threads
from services.trainer.model.flops import active_weights


@dataclass(frozen=True, slots=True)
class Stage:
    """This process's stage."""

    index: int
    count: int
    """Number of stages."""
    ranks: range
    """Ranks of this stage among all processes."""
    group: distributed.ProcessGroup
    """This process and those with the same position in the other stages, in the order of the stages."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def ranks_of(self, index: int) -> range:
        """Returns the ranks of a stage among all processes."""
        size = len(self.ranks)
        return range(index * size, (index + 1) * size)


def build_stage(
    spec: TrainerSpec, *, device: torch.device, rank: int, world_size: int
) -> tuple[RankTopology, Stage]:
    """Arranges the processes as stages of data-parallel and tensor-parallel ranks.

    All ranks must call it, after the default process group exists.

    Raises:
        ValueError: If the number of processes differs from the specification.
    """
    if world_size != spec.world_size:
        raise ValueError(
            f"the run has {spec.world_size} processes for this worker, but {world_size} were started; start "
            f"{spec.world_size}, for example with torchrun --nproc-per-node"
        )
    use_few_threads(spec, device)
    count, tensor = spec.pipeline_parallel, spec.tensor_parallel

    def mesh_of(**sizes: int) -> DeviceMesh:
        shape = (count, *sizes.values())
        return init_device_mesh(device.type, shape, mesh_dim_names=("stages", *sizes))

    mesh = mesh_of(dp=spec.stage_ranks // tensor, tp=tensor)
    index, data, context = mesh.get_local_rank("stages"), mesh["dp"], None
    if spec.context_parallel > 1:
        num_packs = spec.stage_ranks // (spec.context_parallel * tensor)
        packs = mesh_of(data=num_packs, context=spec.context_parallel, tp=tensor)
        data, sharing = packs["data"], packs["context"]
        context = ContextRanks(sharing.get_group(), sharing.get_local_rank(), sharing.size())
    # Tensor-parallel ranks share experts too, as ``parallel.py`` of the engine fsdp arranges them.
    num_sharing = spec.expert_parallel * tensor
    experts = None
    if num_sharing > 1:
        experts = mesh_of(copies=spec.stage_ranks // num_sharing, experts=num_sharing)
    is_first = index == 0 and mesh.get_local_rank("tp") == 0
    topology = RankTopology(
        device=device,
        data=Ranks(
            rank=data.get_local_rank(),
            size=data.size(),
            group=data.get_group(),
            everyone=Ranks(rank=rank, size=world_size, group=distributed.group.WORLD),
            is_first_of_peers=is_first and (context is None or context.rank == 0),
        ),
        rank=rank,
        world_size=world_size,
        mesh=mesh,
        experts=experts,
        context=context,
    )
    size = spec.stage_ranks
    stage = Stage(
        index=index,
        count=spec.pipeline_parallel,
        ranks=range(index * size, (index + 1) * size),
        group=mesh["stages"].get_group(),
    )
    return topology, stage


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Facts about a model of which this process has a part."""

    shapes: Sequence[tuple[str, tuple[int, ...]]]
    """Name and shape of each stored tensor, in the order of a checkpoint."""
    buffers: frozenset[str]
    """Names of stored buffers, which keep their dtype."""
    active_weights: float
    """Number of layer weights that a token passes."""
    num_layers: int
    is_tied: bool
    """True if the output head is the embedding."""
    head: float
    """Work of the output head in layers."""

    def layers(self, num_stages: int) -> list[range]:
        """Returns the layers of each stage."""
        return stage_layers(self.num_layers, num_stages, head=self.head)

    def sender(self, name: str, num_stages: int) -> int:
        """Returns the stage that sends a stored tensor: the first of those that hold it."""
        return stages_of(name, self.layers(num_stages), is_tied=self.is_tied)[0]


def describe(model: PreTrainedModel) -> WholeModel:
    """Returns the facts of a model that is not divided yet, on any device."""
    config: Any = model.config
    shapes = {name: tuple(value.shape) for name, value in stored_tensors(model).items()}
    return WholeModel(
        shapes=[*shapes.items()],
        buffers=frozenset(stored_buffers(model)),
        active_weights=active_weights(model, config),
        num_layers=config.num_hidden_layers,
        is_tied=bool(config.tie_word_embeddings),
        head=head_in_layers(config.to_dict(), shapes),
    )


class LayerElsewhere(nn.Module):
    """Stands for a layer of another stage: returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return states


def keep_stage(model: PreTrainedModel, stage: Stage, layers: range, *, uses_head: bool) -> None:
    """Removes from a model, in place, what other stages have; names of the rest do not change.

    Args:
        layers: Layers of this stage.
        uses_head: True if the last stage computes logits. Otherwise it keeps no copy of an embedding that is
            also the head.
    """
    causal: Any = model
    decoder, config = causal.get_decoder(), causal.config
    for number, layer in enumerate(decoder.layers):
        if number not in layers:
            decoder.layers[number] = LayerElsewhere(layer)
    is_tied = bool(config.tie_word_embeddings)
    has_head = stage.is_last and (uses_head or not is_tied)
    if not stage.is_first and not (has_head and is_tied):
        decoder.embed_tokens = nn.Identity()
    if not stage.is_last:
        decoder.norm = nn.Identity()
    if not has_head:
        causal.lm_head = nn.Identity()
        # transformers would look for the head that it ties to the embedding.
        causal.tie_weights = _tie_nothing


def _tie_nothing(*arguments: Any, **options: Any) -> None:
    """Replaces ``tie_weights`` where a stage has only one of the two."""


def hidden_size(config: PretrainedConfig) -> int:
    """Returns the width of the states that stages exchange."""
    shape: Any = config
    return int(shape.hidden_size)
