"""Distribution of the model over processes: device meshes, FSDP2, tensor and expert parallelism.

mesh   dp x tp; FSDP2 shards over dp, tensor-parallel ranks share layers. With expert parallelism, dp is
       copies x experts: each of the inner ranks holds a part of the experts of every layer. Tensor-parallel
       ranks hold parts of them too, in a second mesh of copies x (experts x tp). With context
       parallelism, dp is data x context: each of the inner ranks computes a part of every pack's tokens.
       With both, weights use the mesh with experts, and packs use the mesh with context
frozen a rank that keeps gathered weights holds frozen ones whole, in the dtype of the forward pass and
       outside of FSDP2: nothing would be sharded, and each pass would copy them
order  tensor and expert parallelism -> activation memory (``activations.py``) -> FSDP2, innermost first
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from services.common.host import missing_compiler
from services.common.models.families import check_trainer, is_mixture
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.context import ContextRanks
from services.trainer.collectives import Ranks, join_processes
from services.trainer.engines.fsdp.activations import compiled, set_up_activations
from services.trainer.engines.fsdp.casting import casts_weights
from services.trainer.model.experts import ExpertRanks, SummedGradient, TokenPeers, share_experts
from services.trainer.model.policy import Critic, Policy


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Position of this process in the parallelism of the worker's processes."""

    device: torch.device
    """Device of the model."""
    data: Ranks
    """Data-parallel ranks, one for each pack that is computed at a time."""
    rank: int = 0
    """Rank of this process among all."""
    world_size: int = 1
    """Number of processes."""
    mesh: DeviceMesh | None = None
    """Mesh ``dp`` x ``tp``; None for a single process that needs no sharding."""
    experts: DeviceMesh | None = None
    """Mesh ``copies`` x ``experts``, which ``dp`` consists of, or all ranks with tensor parallelism; None if
    every rank computes all experts.
    """
    context: ContextRanks | None = None
    """Ranks that compute a pack together; None if each computes its own."""

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that share each layer."""
        return 1 if self.mesh is None else self.mesh["tp"].size()

    @property
    def sharding(self) -> Ranks:
        if self.mesh is None:
            return self.data
        dp = self.mesh["dp"]
        return Ranks(rank=dp.get_local_rank(), size=dp.size(), group=dp.get_group())


def build_topology(
    spec: TrainerSpec, *, device: torch.device, rank: int, world_size: int
) -> RankTopology:
    """Arranges the processes as data-parallel ranks and the ranks that share samples with them.

    One process in float32 needs no mesh. With mixed precision or offloading, one process is sharded over
    itself, so that FSDP2 provides both in the same way as for several.

    Raises:
        ValueError: If the number of processes differs from the specification, or kernels cannot be compiled.
    """
    if device.type == "cuda" and (problem := missing_compiler()):
        raise ValueError(problem)
    if world_size != spec.world_size:
        raise ValueError(
            f"the run has {spec.world_size} processes for this worker, but {world_size} were started; start "
            f"{spec.world_size}, for example with torchrun --nproc-per-node"
        )
    use_few_threads(spec, device)
    if world_size == 1:
        if spec.dtype == "float32" and not spec.offloads_weights:
            return RankTopology(device=device, data=Ranks())
        join_processes(device=device, rank=0, world_size=1)
    mesh, packs = _meshes(spec, device)
    data = mesh["dp"] if packs is None else packs["data"]
    everyone = Ranks(rank=rank, size=world_size, group=distributed.group.WORLD)
    return RankTopology(
        device=device,
        data=Ranks(
            rank=data.get_local_rank(),
            size=data.size(),
            group=data.get_group(),
            everyone=everyone if data.size() < world_size else None,
            is_first_of_peers=mesh.get_local_rank("tp") == 0
            and (packs is None or packs.get_local_rank("context") == 0),
        ),
        rank=rank,
        world_size=world_size,
        mesh=mesh,
        experts=_expert_mesh(spec, mesh, device),
        context=None if packs is None else _context(packs),
    )


def use_few_threads(spec: TrainerSpec, device: torch.device) -> None:
    """Limits torch to one CPU thread if a GPU holds the weights; must run before any compilation.

    With a GPU, the CPU only lays out batches, in operations of microseconds. An operation that is divided
    among threads waits for the last of them, and waits a time slice if an engine occupies the processors.
    Compiled code depends on the number of threads: with another number, all of it would be compiled again.
    """
    if device.type == "cuda" and not spec.offloads_weights:
        torch.set_num_threads(1)


def _meshes(spec: TrainerSpec, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Returns the mesh of weights, and the mesh of packs if context parallelism is used."""
    tensor = spec.tensor_parallel
    meshes = []
    for names, inner in (
        (("copies", "experts"), spec.expert_parallel if tensor == 1 else 1),
        (("data", "context"), spec.context_parallel),
    ):
        if inner > 1:
            shape = (spec.world_size // (inner * tensor), inner, tensor)
            meshes.append(init_device_mesh(device.type, shape, mesh_dim_names=(*names, "tp")))
            if len(meshes) == 1:
                meshes[0][names]._flatten("dp")  # noqa: SLF001 -- torch has no other name for it
    if not meshes:
        meshes = [
            init_device_mesh(
                device.type, (spec.world_size // tensor, tensor), mesh_dim_names=("dp", "tp")
            )
        ]
    return meshes[0], meshes[-1] if spec.context_parallel > 1 else None


def _expert_mesh(spec: TrainerSpec, mesh: DeviceMesh, device: torch.device) -> DeviceMesh | None:
    """Returns the mesh ``copies`` x ``experts``."""
    sharing = spec.expert_parallel * spec.tensor_parallel
    if spec.tensor_parallel > 1:
        shape = spec.world_size // sharing, sharing
        return init_device_mesh(device.type, shape, mesh_dim_names=("copies", "experts"))
    return mesh["copies", "experts"] if spec.expert_parallel > 1 else None


def _context(packs: DeviceMesh) -> ContextRanks:
    context = packs["context"]
    return ContextRanks(context.get_group(), context.get_local_rank(), context.size())


def distribute(module: Policy | Critic, spec: TrainerSpec, topology: RankTopology) -> None:
    """Distributes a policy or critic in place; its parameters become sharded if there is a mesh.

    Raises:
        ValueError: If heads or experts cannot be divided evenly among ranks.
    """
    decoder: Any = module.get_submodule("model").get_decoder()  # type: ignore[operator]
    # A pipeline stage has only some of the layers.
    layers = nn.ModuleList(
        layer for layer in decoder.layers if any(True for _ in layer.parameters())
    )
    if topology.context is not None:
        _check_model(
            module, tensor_parallel=spec.tensor_parallel, context_parallel=spec.context_parallel
        )
        module.context = topology.context
    _divide(module, layers, spec, topology)
    set_up_activations(layers, spec, device=topology.device, is_seen=_is_seen(module, topology))
    if spec.compile:
        decoder.norm.forward = compiled(decoder.norm.forward)
    if spec.casts_by_layer:
        dtype = getattr(torch, spec.dtype)
        casting_forward = casts_weights(module, module.forward, dtype, without=layers)
        setattr(module, "forward", casting_forward)  # noqa: B010 -- mypy takes it for a method
    if topology.mesh is not None and not spec.casts_by_layer:
        _shard(module, layers, spec, topology)
    elif not any(parameter.is_meta for parameter in module.parameters()):
        module.to(topology.device)


def _is_seen(module: nn.Module, topology: RankTopology) -> bool:
    """Returns True if the compiler can trace a whole layer: no collectives, experts or other kernels."""
    config: Any = module.get_submodule("model").config
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    is_plain = not is_capped and not is_mixture(config.to_dict())
    return is_plain and topology.context is None and topology.device.type == "cuda"


def _divide(
    module: nn.Module, layers: nn.ModuleList, spec: TrainerSpec, topology: RankTopology
) -> None:
    """Keeps this rank's part of heads and columns (tensor parallelism) and of experts."""
    shared = [*_experts(layers)]
    # Ranks compute all of a dense teacher, though they share the experts of the policy.
    sharing_ranks = spec.expert_parallel if shared else 1
    if topology.mesh is not None and spec.tensor_parallel > 1:
        _check_model(module, tensor_parallel=spec.tensor_parallel, expert_parallel=sharing_ranks)
        tensor = topology.mesh["tp"]
        for layer in layers:
            plan = {name: style for name, style in _TENSOR_PLAN.items() if _has(layer, name)}
            parallelize_module(layer, tensor, plan)
            for attention in layer.modules():
                if hasattr(attention, "kv_a_proj_with_mqa"):
                    _sum_latent_gradients(attention, tensor.get_group())
    if topology.experts is not None:
        if sharing_ranks > 1:
            _check_model(module, expert_parallel=sharing_ranks)
        for experts in shared:
            _share(experts, topology)


def _shard(
    module: nn.Module, layers: nn.ModuleList, spec: TrainerSpec, topology: RankTopology
) -> None:
    """Shards parameters, gradients and optimizer states over the ranks that hold the same part of a layer."""
    assert topology.mesh is not None
    options: dict[str, Any] = {
        "mesh": topology.mesh["dp"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, spec.dtype), reduce_dtype=torch.float32
        ),
        "reshard_after_forward": False if spec.keeps_gathered else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=topology.device.type == "cuda")
        if spec.offloads_weights
        else OffloadPolicy(),
    }
    if spec.keeps_gathered and not spec.offloads_weights:
        options["ignored_params"] = {leaf for leaf in module.parameters() if not leaf.requires_grad}
    if topology.experts is not None:
        for experts in _experts(layers):
            fully_shard(experts, **{**options, "mesh": topology.experts["copies"]})
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    if topology.mesh["dp"].size() == 1 and not spec.offloads_weights and topology.experts is None:
        _use_one_stream(module)


_STREAMS = (
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "reduce_scatter_stream",
    "all_reduce_stream",
)
"""FSDP's streams, by the names of its shared context."""


def _use_one_stream(module: nn.Module) -> None:
    """Makes FSDP exchange in the stream of the passes, for a rank that exchanges with no other.

    The allocator keeps blocks that one stream has freed from another. In the last micro-batch of an update,
    whole gradients are freed in one stream and sharded ones allocated in another, so that their memory would
    be reserved twice, and once more for gathered weights.
    """
    context: Any = module._get_fsdp_state()._comm_ctx  # type: ignore[operator]  # noqa: SLF001 -- FSDP has no option for it
    create_streams = context.lazy_init

    def create_one(device: torch.device) -> None:
        create_streams(device)
        stream = context.device_handle.current_stream()
        for name in _STREAMS:
            setattr(context, name, stream)

    context.lazy_init = create_one


def begin_micro_batch(module: nn.Module, *, is_last: bool, spec: TrainerSpec) -> None:
    """Prepares FSDP2 for the forward and backward pass of one of an update's micro-batches."""
    if isinstance(module, FSDPModule) and spec.keeps_gathered and not spec.offloads_weights:
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last)


def free_gathered(module: nn.Module) -> None:
    """Frees gathered parameters after a forward pass without a backward pass.

    FSDP keeps the parameters of the root, and on a single rank those of all layers, for a backward pass;
    kept over an update they would be stale.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


_TENSOR_PLAN: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    # For normalized heads: the sharded "sequence" dimension of [1, T, heads, D] is that of heads.
    "self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "self_attn.o_proj": RowwiseParallel(),
    # Latent attention: what comes before the heads is replicated.
    "self_attn.q_b_proj": ColwiseParallel(),
    "self_attn.kv_b_proj": ColwiseParallel(),
    **{
        f"{prefix}.{name}": style()
        for prefix in ("mlp", "mlp.shared_expert", "mlp.shared_experts")
        for name, style in (
            ("gate_proj", ColwiseParallel),
            ("up_proj", ColwiseParallel),
            ("down_proj", RowwiseParallel),
        )
    },
}
"""Attention is divided by heads, the feed-forward part by columns; norms and embeddings are replicated."""


def _has(layer: nn.Module, name: str) -> bool:
    return any(module_name == name for module_name, _ in layer.named_modules())


def _experts(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Yields the fused experts of the layers that have some."""
    return (module for name, module in layers.named_modules() if name.endswith(".experts"))


def _share(experts: nn.Module, topology: RankTopology) -> None:
    """Keeps this rank's part of a layer's experts, in place."""
    assert topology.experts is not None and topology.mesh is not None
    mesh, tensor = topology.experts["experts"], topology.mesh["tp"]
    for name, parameter in list(experts.named_parameters()):
        shard = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        # Moves a part in host memory to the mesh's device, which FSDP2 expects of sharded parameters.
        sharded = DTensor.from_local(shard, mesh, (Shard(0),), run_check=False)
        setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    peers = None
    if tensor.size() > 1:
        peers = TokenPeers(tensor.get_group(), tensor.get_local_rank(), tensor.size())
    num_packs = mesh.size() // tensor.size()
    share_experts(experts, ExpertRanks(mesh.get_group(), mesh.size(), num_packs, peers))


def _sum_latent_gradients(attention: Any, group: distributed.ProcessGroup) -> None:
    """Sums the gradients of rotated latent keys over ranks, each of which uses them for its own heads."""
    hook = partial(_sum_gradients, group, int(attention.qk_rope_head_dim))
    attention.kv_a_proj_with_mqa.register_forward_hook(hook)


def _sum_gradients(
    group: distributed.ProcessGroup, rotated: int, module: nn.Module, inputs: Any, output: Tensor
) -> Tensor:
    """Returns a latent, whose rotated part gets the sum of its gradients.

    The other part passes a projection that is divided by columns, whose input has the whole gradient.
    """
    latent, keys = output.split([output.shape[-1] - rotated, rotated], dim=-1)
    summed: Tensor = SummedGradient.apply(keys, group)  # type: ignore[no-untyped-call]
    return torch.cat([latent, summed], -1)


def _check_model(module: nn.Module, **degrees: int) -> None:
    config: Any = module.get_submodule("model").config
    problems = check_trainer(config.to_dict(), **degrees)
    if problems:
        raise ValueError("; ".join(problems))
