"""Context parallelism: several ranks compute a pack together, split by tokens and, in attention, by heads.

tokens      chunks of equal size, the last ones padded; embeddings, norms, projections, feed-forward parts
            and predictions are computed for a rank's own chunk
attention   chunks of all heads -> all tokens of some heads -> chunks of all heads (arXiv:2309.14509), so
            that the result equals that of one rank, for any layout
results     all predictions are gathered, so that every rank has the loss of the whole pack
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Ranks that compute each pack together, in the order of their tokens."""

    group: distributed.ProcessGroup
    """Process group for tensors of the model's device."""
    rank: int
    """This process's rank."""
    size: int
    """Number of ranks."""

    def chunk(self, num_tokens: int) -> int:
        """Returns the number of tokens of each rank, including padding."""
        return -(-num_tokens // self.size)

    def num_local(self, num_tokens: int) -> int:
        """Returns the number of this rank's tokens without padding."""
        size = self.chunk(num_tokens)
        return min(size, max(0, num_tokens - self.rank * size))

    def own(self, tokens: Tensor, *, filler: int = 0) -> Tensor:
        """Returns this rank's tokens, padded: ``[T, ...]`` to ``[C, ...]``."""
        size = self.chunk(len(tokens))
        share = tokens[self.rank * size :][:size]
        return torch.cat([share, share.new_full((size - len(share), *share.shape[1:]), filler)])

    def local_heads(self, of_heads: Tensor) -> Tensor:
        """Returns this rank's heads of ``[heads]``."""
        return of_heads.chunk(self.size)[self.rank]

    # The compiler cannot trace collectives.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, states: Tensor, num_tokens: int) -> Tensor:
        """Exchanges ``[1, heads, C, D]`` of this rank's tokens for ``[1, heads / size, T, D]`` of all tokens.

        There may be fewer key and value heads; they are repeated until each rank has the same number.
        """
        heads, size, width = states.shape[1:]
        repeats = self.size // gcd(heads, self.size)
        if repeats > 1:
            states = states.repeat_interleave(repeats, 1)
        share = heads * repeats // self.size
        arrived = all_to_all(states[0], [share] * self.size, group=self.group)
        by_head = arrived.view(self.size, share, size, width).transpose(0, 1)
        return by_head.reshape(1, share, self.size * size, width)[:, :, :num_tokens]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, outputs: Tensor) -> Tensor:
        """Exchanges ``[1, T, heads / size, D]`` of all tokens for this rank's ``[1, C, heads, D]``."""
        num_tokens, share, width = outputs.shape[1:]
        size = self.chunk(num_tokens)
        filled = functional.pad(outputs[0], (0, 0, 0, 0, 0, self.size * size - num_tokens))
        arrived = all_to_all(filled, [size] * self.size, group=self.group)
        by_token = arrived.view(self.size, size, share, width).transpose(0, 1)
        return by_token.reshape(1, size, self.size * share, width)

    def gathered(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenates the values of all ranks, from which each rank then computes the same loss.

        Args:
            values: ``[counts[rank], ...]``.
            counts: Number of values of each rank.
        """
        result: Tensor = _AllGather.apply(values, counts, self)  # type: ignore[no-untyped-call]
        return result

    def summed(self, values: Tensor) -> Tensor:
        """Sums values over ranks, from which each rank then computes the same loss."""
        result: Tensor = _AllReduce.apply(values, self)  # type: ignore[no-untyped-call]
        return result

    def whole(self, flags: Tensor, num_tokens: int) -> Tensor:
        """Gathers ``[C]`` bool of this rank's tokens to ``[T]`` of all."""
        rank_flags = flags.to(torch.uint8)
        flags_of_ranks = [torch.empty_like(rank_flags) for _ in range(self.size)]
        distributed.all_gather(flags_of_ranks, rank_flags, group=self.group)
        return torch.cat(flags_of_ranks)[:num_tokens].bool()


def all_to_all(
    rows: Tensor,
    send_counts: list[int],
    receive_counts: list[int] | None = None,
    *,
    group: distributed.ProcessGroup,
) -> Tensor:
    """Sends rows to ranks and returns the rows received; gradients take the reverse path.

    Args:
        rows: ``[N, ...]``, sorted by destination rank.
        send_counts: Number of rows for each rank.
        receive_counts: Number of rows from each rank; None if the same as ``send_counts``.
        group: The ranks, all of which must call it.
    """
    result: Tensor = _AllToAll.apply(rows, send_counts, receive_counts or send_counts, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_counts: list[int],
        receive_counts: list[int],
        group: distributed.ProcessGroup,
    ) -> Tensor:
        ctx.plan = send_counts, receive_counts, group
        return _moved(rows, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send_counts, receive_counts, group = ctx.plan
        return _moved(gradients[0], receive_counts, send_counts, group), None, None, None


def _moved(
    rows: Tensor, outgoing: list[int], incoming: list[int], group: distributed.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(incoming), *rows.shape[1:])
    distributed.all_to_all_single(arrived, rows.contiguous(), incoming, outgoing, group=group)
    return arrived


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], ranks: ContextRanks) -> Tensor:
        ctx.plan = counts, ranks
        filled = functional.pad(values, (0, 0) * (values.ndim - 1) + (0, max(counts) - len(values)))
        rows_of_ranks = [torch.empty_like(filled) for _ in counts]
        distributed.all_gather(rows_of_ranks, filled, group=ranks.group)
        return torch.cat([rows[:count] for rows, count in zip(rows_of_ranks, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        counts, ranks = ctx.plan
        # Every rank has the gradient of the same loss for its own tokens. FSDP averages these gradients,
        # but their sum is needed.
        return gradients[0].split(counts)[ranks.rank] * ranks.size, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.size = ranks.size
        total = values.clone()
        distributed.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # FSDP averages the gradients, as in _AllGather.
        return gradients[0] * ctx.size, None
