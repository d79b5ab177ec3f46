"""A pack that several ranks compute together: each has a part of the tokens, in attention of the heads.

tokens      chunks of like size, the last ones filled up; embeddings, norms, projections, feed-forward parts
            and predictions are of a rank's own chunk
attention   chunks of all heads -> all tokens of some heads -> chunks of all heads (arXiv:2309.14509), so that
            it is what it is on one rank, whatever its layout
results     of all predictions, gathered, so that every rank has the loss of the whole pack
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
    """The ranks that compute each pack together, in the order of their tokens."""

    group: distributed.ProcessGroup
    """Carries tensors of the model's device."""
    rank: int
    """This one."""
    size: int
    """All of them."""

    def chunk(self, num_tokens: int) -> int:
        """Tokens of each rank, those that fill up among them."""
        return -(-num_tokens // self.size)

    def num_own(self, num_tokens: int) -> int:
        """This rank's tokens without those that fill up."""
        size = self.chunk(num_tokens)
        return min(size, max(0, num_tokens - self.rank * size))

    def own(self, tokens: Tensor, *, filler: int = 0) -> Tensor:
        """``[T, ...]`` to ``[C, ...]``: this rank's tokens, filled up."""
        size = self.chunk(len(tokens))
        part = tokens[self.rank * size :][:size]
        return torch.cat([part, part.new_full((size - len(part), *part.shape[1:]), filler)])

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """``[heads]`` to those of this rank."""
        return of_heads.chunk(self.size)[self.rank]

    # The compiler does not see through what ranks do together.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, states: Tensor, num_tokens: int) -> Tensor:
        """``[1, heads, C, D]`` of this rank's tokens to ``[1, heads / size, T, D]`` of all tokens.

        Heads of keys and values, which may be fewer, are repeated until each rank has the same number.
        """
        heads, size, width = states.shape[1:]
        repeats = self.size // gcd(heads, self.size)
        if repeats > 1:
            states = states.repeat_interleave(repeats, 1)
        share = heads * repeats // self.size
        arrived = exchanged(states[0], [share] * self.size, group=self.group)
        by_head = arrived.view(self.size, share, size, width).transpose(0, 1)
        return by_head.reshape(1, share, self.size * size, width)[:, :, :num_tokens]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, outputs: Tensor) -> Tensor:
        """``[1, T, heads / size, D]`` of all tokens to ``[1, C, heads, D]`` of this rank's."""
        num_tokens, share, width = outputs.shape[1:]
        size = self.chunk(num_tokens)
        filled = functional.pad(outputs[0], (0, 0, 0, 0, 0, self.size * size - num_tokens))
        arrived = exchanged(filled, [size] * self.size, group=self.group)
        by_token = arrived.view(self.size, size, share, width).transpose(0, 1)
        return by_token.reshape(1, size, self.size * share, width)

    def gathered(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Values of all ranks, one behind the other. Each rank then computes the same loss of them.

        Args:
            values: ``[counts[rank]]``.
            counts: Values of each rank.
        """
        result: Tensor = _Gathered.apply(values, counts, self)  # type: ignore[no-untyped-call]
        return result

    def summed(self, values: Tensor) -> Tensor:
        """The sum over ranks of what each has of its own tokens. Each then computes the same loss of it."""
        result: Tensor = _Summed.apply(values, self)  # type: ignore[no-untyped-call]
        return result

    def whole(self, flags: Tensor, num_tokens: int) -> Tensor:
        """``[C]`` bool of this rank's tokens to ``[T]`` of all."""
        mine = flags.to(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self.group)
        return torch.cat(parts)[:num_tokens].bool()


def exchanged(
    rows: Tensor,
    sent: list[int],
    received: list[int] | None = None,
    *,
    group: distributed.ProcessGroup,
) -> Tensor:
    """Send rows to ranks, and return what came from them; gradients go the same way back.

    Args:
        rows: ``[N, ...]``, by the rank that they go to.
        sent: Rows for each rank.
        received: Rows from each rank; None if they are as many.
        group: The ranks. Every one of them calls it.
    """
    result: Tensor = _Exchange.apply(rows, sent, received or sent, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: distributed.ProcessGroup,
    ) -> Tensor:
        ctx.plan = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.plan
        return _moved(gradients[0], received, sent, group), None, None, None


def _moved(
    rows: Tensor, sent: list[int], received: list[int], group: distributed.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], ranks: ContextRanks) -> Tensor:
        ctx.plan = counts, ranks
        filled = functional.pad(values, (0, max(counts) - len(values)))
        parts = [torch.empty_like(filled) for _ in counts]
        distributed.all_gather(parts, filled, group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        counts, ranks = ctx.plan
        # Every rank has the gradient of the same loss. FSDP takes the mean of what they make of it, each of
        # its own tokens, and wanted is the sum.
        return gradients[0].split(counts)[ranks.rank] * ranks.size, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.size = ranks.size
        total = values.clone()
        distributed.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # As of what is gathered.
        return gradients[0] * ctx.size, None
