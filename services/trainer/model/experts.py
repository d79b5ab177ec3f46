"""Forward pass of a layer's experts: sorts tokens by expert, multiplies, and restores their order.

Registered with transformers under :data:`EXPERTS`, for any model whose experts are fused tensors. On a GPU
in bfloat16, torch's grouped kernel computes all products at once; otherwise a loop does. Every expert takes
part, even without tokens, so that its gradient is 0 instead of missing: other ranks wait for every gradient.

    alone    tokens -> a copy for each chosen expert, sorted -> products -> weighted sum
    shared   between sorting and products, copies are sent to the ranks that hold their experts, and back
    tensor   tensor-parallel ranks have the same tokens: each takes some of them, and gets all results
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.trainer.batch.context import all_to_all
from services.trainer.collectives import local_part

EXPERTS = "slipstream_experts"
_RANKS = "slipstream_expert_ranks"
_ALIGNED = 8
"""Row alignment, in numbers, that torch's grouped kernel requires in half precision."""


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Ranks that share the experts of every layer, in the order of the experts."""

    group: distributed.ProcessGroup
    """Process group for tensors of the model's device."""
    size: int
    """Number of ranks."""
    num_packs: int
    """Number of packs whose tokens they compute: fewer than ranks if some have the same tokens."""
    peers: "TokenPeers | None" = None
    """Ranks that have the same tokens as this one; None if there are no others."""


@dataclass(frozen=True, slots=True)
class TokenPeers:
    """Tensor-parallel ranks, each of which sends a part of their common tokens to the experts."""

    group: distributed.ProcessGroup
    """Process group for tensors of the model's device."""
    rank: int
    size: int

    def part(self, num_tokens: int) -> slice:
        """Returns the tokens of this rank."""
        size = -(-num_tokens // self.size)
        start = min(self.rank * size, num_tokens)
        return slice(start, min(start + size, num_tokens))

    def gathered(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Returns ``[num_tokens, ...]`` rows of all ranks from those of each."""
        size = -(-num_tokens // self.size)
        filled = rows.new_zeros(size, *rows.shape[1:])
        filled[: len(rows)] = rows
        parts = [torch.empty_like(filled) for _ in range(self.size)]
        distributed.all_gather(parts, filled, group=self.group)
        whole = torch.cat(parts)
        # FSDP2 needs a tensor that is no view.
        return whole if len(whole) == num_tokens else whole[:num_tokens].clone()


def share_experts(module: nn.Module, ranks: ExpertRanks) -> None:
    """Records the ranks that share the experts of a layer."""
    setattr(module, _RANKS, ranks)


# Not compiled: the host learns an expert's number of tokens only during the pass, and it differs from pack
# to pack.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(module: Any, hidden: Tensor, chosen_experts: Tensor, weights: Tensor) -> Tensor:
    """Computes the weighted sum of the chosen experts' outputs for each token.

    Args:
        hidden: ``[T, H]``.
        chosen_experts: ``[T, K]`` int64 experts of each token.
        weights: ``[T, K]``.

    Returns:
        ``[T, H]``.
    """
    ranks: ExpertRanks | None = getattr(module, _RANKS, None)
    if ranks is None or ranks.peers is None:
        return _outputs(module, hidden, chosen_experts, weights, ranks)
    peers, num_tokens = ranks.peers, len(hidden)
    tokens: Tensor = _PartOfTokens.apply(hidden, peers)  # type: ignore[no-untyped-call]
    shares: Tensor = _PartOfTokens.apply(weights, peers)  # type: ignore[no-untyped-call]
    outputs = _outputs(module, tokens, chosen_experts[peers.part(num_tokens)], shares, ranks)
    whole: Tensor = _AllTokens.apply(outputs, num_tokens, peers)  # type: ignore[no-untyped-call]
    return whole


def _outputs(
    module: Any, hidden: Tensor, chosen_experts: Tensor, weights: Tensor, ranks: ExpertRanks | None
) -> Tensor:
    """Computes :func:`experts_forward` for the tokens that this rank sends to the experts."""
    num_chosen = chosen_experts.shape[1]
    owners = chosen_experts.flatten()
    order = torch.argsort(owners, stable=True)
    num_experts = local_part(module.down_proj).shape[0] * (1 if ranks is None else ranks.size)
    counts = owners.new_zeros(num_experts).scatter_add_(0, owners, torch.ones_like(owners))
    unsorted = _inverse(order)
    rows: Tensor = _Copies.apply(hidden, order, unsorted, num_chosen)  # type: ignore[no-untyped-call]
    shares = weights.flatten()[order][:, None]
    if ranks is None:
        outputs = _products(module, rows, shares, counts, ranks)
    else:
        outputs = _elsewhere(module, rows, shares, counts, ranks)
    summed: Tensor = _SumOfCopies.apply(outputs, order, unsorted, num_chosen)  # type: ignore[no-untyped-call]
    return summed.to(hidden.dtype)


class _Copies(torch.autograd.Function):
    """Returns a copy of each token for each of its experts, sorted by expert: ``[T * K, H]``.

    Its gradient is the sum of a token's copies, and it is that of :class:`_SumOfCopies`: neither scatters,
    which torch does for the gradient of an index, row by row.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, unsorted: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(unsorted)
        ctx.count = count
        return tokens.index_select(0, order // count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (unsorted,) = ctx.saved_tensors
        return _summed(gradients[0], unsorted, ctx.count), None, None, None


class _SumOfCopies(torch.autograd.Function):
    """Returns the sum of each token's copies: ``[T, H]``; see :class:`_Copies`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, unsorted: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.count = count
        return _summed(rows, unsorted, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order // ctx.count), None, None, None


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy_(
        0, order, torch.arange(len(order), device=order.device)
    )


def _summed(rows: Tensor, unsorted: Tensor, count: int) -> Tensor:
    # A tensor-parallel rank may have no token of a short pack.
    by_token = unsorted.view(len(rows) // count, count)
    summed: Tensor = _fused(_sum_of_rows, rows)(rows, by_token)
    return summed


def _sum_of_rows(rows: Tensor, by_token: Tensor) -> Tensor:
    return rows[by_token].sum(1)


def _gate(module: Any, rows: Tensor, shares: Tensor) -> Tensor:
    gated: Tensor = module._apply_gate(rows)  # noqa: SLF001
    return (gated * shares).to(rows.dtype)


def _fused(function: Any, rows: Tensor) -> Any:
    """Returns a function of ``[N, ...]`` rows as one kernel on a GPU, instead of one for each operation."""
    if not rows.is_cuda or not len(rows):
        return function
    # The width is static: a kernel for any width would divide by it for every number.
    torch._dynamo.mark_static(rows, 1)  # noqa: SLF001
    return _compiled(function)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _elsewhere(
    module: Any, rows: Tensor, shares: Tensor, counts: Tensor, ranks: ExpertRanks
) -> Tensor:
    """Computes :func:`_products` of sorted rows on the ranks that hold their experts."""
    arriving = torch.empty_like(counts)
    distributed.all_to_all_single(arriving, counts, group=ranks.group)
    by_rank = torch.stack([counts, arriving]).view(2, ranks.size, -1)
    sent_rows, received_rows = by_rank.sum(2).tolist()
    arrived = all_to_all(rows, sent_rows, received_rows, group=ranks.group)
    shares = all_to_all(shares, sent_rows, received_rows, group=ranks.group)
    # Rows arrive sorted by rank and then by expert; the products need them sorted by expert.
    experts = torch.arange(by_rank.shape[2], device=rows.device).repeat(ranks.size)
    order = torch.argsort(experts.repeat_interleave(by_rank[1].flatten()), stable=True)
    unsorted = _inverse(order)
    arrived = _Copies.apply(arrived, order, unsorted, 1)  # type: ignore[no-untyped-call]
    outputs = _products(module, arrived, shares[order], by_rank[1].sum(0), ranks)
    outputs = _SumOfCopies.apply(outputs, order, unsorted, 1)  # type: ignore[no-untyped-call]
    return all_to_all(outputs, received_rows, sent_rows, group=ranks.group)


def _products(
    module: Any, rows: Tensor, shares: Tensor, counts: Tensor, ranks: ExpertRanks | None
) -> Tensor:
    """Applies both layers of this rank's experts to rows sorted by expert, and multiplies by the shares.

    It multiplies between the layers, where rows are narrower than after them, because the backward pass
    keeps the multiplied rows.
    """
    outputs = _product(module, "gate_up_proj", rows, counts, ranks)
    gated = _fused(_gate, outputs)(module, outputs, shares)
    return _product(module, "down_proj", gated, counts, ranks, shares=shares)


def _product(
    module: Any,
    name: str,
    rows: Tensor,
    counts: Tensor,
    ranks: ExpertRanks | None,
    *,
    shares: Tensor | None = None,
) -> Tensor:
    weight = _weight(module, name, ranks)
    outputs = _by_expert(rows, weight if module.is_transposed else weight.mT, counts)
    down, up = expert_adapter(name)
    if hasattr(module, down):
        narrow = _by_expert(rows, _weight(module, down, ranks).mT, counts)
        lora_outputs = _by_expert(narrow, _weight(module, up, ranks).mT, counts)
        outputs = outputs + module.lora_scaling * lora_outputs
    if module.has_bias:
        bias = _weight(module, f"{name}_bias", ranks)
        biases = bias.repeat_interleave(counts, 0, output_size=len(rows))
        outputs = outputs + (biases if shares is None else (biases * shares).to(rows.dtype))
    return outputs


def expert_adapter(name: str) -> tuple[str, str]:
    """Returns the names of the two adapter tensors of a fused tensor."""
    return f"lora_A_{name}", f"lora_B_{name}"


def _by_expert(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiplies each row, sorted by expert, by the matrix of its expert.

    Args:
        rows: ``[N, I]``.
        weight: ``[E, I, O]``.
        counts: ``[E]`` rows of each expert.

    Returns:
        ``[N, O]``.
    """
    is_aligned = not any(size % _ALIGNED for size in weight.shape[1:])
    if rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned:
        offsets = counts.cumsum(0).to(torch.int32)
        outputs: Tensor = functional.grouped_mm(rows, weight, offs=offsets)
        return outputs
    parts = zip(rows.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([expert_rows @ matrix for expert_rows, matrix in parts])


def _weight(module: Any, name: str, ranks: ExpertRanks | None) -> Tensor:
    """Returns a tensor of this rank's experts; scales its gradient, a sum over ranks' tokens, to a mean."""
    weight = local_part(getattr(module, name))
    if ranks is None:
        return weight
    averaged: Tensor = _ScaledGradient.apply(weight, 1.0 / ranks.num_packs)  # type: ignore[no-untyped-call]
    return averaged


class _ScaledGradient(torch.autograd.Function):
    """Returns the same tensor, and scales its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class _PartOfTokens(torch.autograd.Function):
    """Returns this rank's part of tokens that all peers have; its gradient is that of all tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: TokenPeers) -> Tensor:
        ctx.plan = len(rows), peers
        return rows[peers.part(len(rows))].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        num_tokens, peers = ctx.plan
        return peers.gathered(gradients[0], num_tokens), None


class _AllTokens(torch.autograd.Function):
    """Gathers the results of all peers, from which each then computes the same loss."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_tokens: int, peers: TokenPeers) -> Tensor:
        ctx.plan = num_tokens, peers
        return peers.gathered(rows, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        num_tokens, peers = ctx.plan
        return gradients[0][peers.part(num_tokens)].contiguous(), None, None


class SummedGradient(torch.autograd.Function):
    """Returns the same tensor; sums its gradient over ranks that each used it for other heads."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
