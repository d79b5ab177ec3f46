"""Sequences without padding: per-sequence sums, means and recursions over flat tokens.

Tokens of all sequences lie one behind the other in ``[T]`` tensors. A :class:`Segments` says where
each sequence ends; everything else in the trainer's mathematics works on the flat tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which sequence each token of a flat ``[T]`` tensor belongs to."""

    lengths: Tensor
    """``[N]`` int64, tokens per sequence."""
    ids: Tensor
    """``[T]`` int64, index of each token's sequence."""

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "Segments":
        """Segments of the given ``[N]`` lengths."""
        lengths = lengths.to(torch.int64)
        positions = torch.arange(len(lengths), device=lengths.device)
        return cls(lengths=lengths, ids=torch.repeat_interleave(positions, lengths))

    def to(self, device: torch.device) -> "Segments":
        """The same segments on ``device``. Made there, they would wait for all that it still does."""
        return Segments(on_device(self.lengths, device), on_device(self.ids, device))

    def __len__(self) -> int:
        return len(self.lengths)

    def sum(self, values: Tensor) -> Tensor:
        """``[T]`` to ``[N]``: the sum over each sequence, 0 for an empty one."""
        return values.new_zeros(len(self)).index_add(0, self.ids, values)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """``[T]`` to ``[N]``: the mean over tokens in ``mask``, 0 where a sequence has none."""
        weights = mask.to(values.dtype)
        # A masked value may be anything, infinite too, so it is replaced and not multiplied by 0.
        return self.sum(torch.where(mask, values, 0.0)) / self.sum(weights).clamp(min=1.0)

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """``[T]`` to ``[N]``: the maximum over tokens in ``mask``, -inf where there is none."""
        lowest = values.new_full((len(self),), -torch.inf)
        masked = torch.where(mask, values, -torch.inf)
        return lowest.scatter_reduce(0, self.ids, masked, reduce="amax")

    def count(self, mask: Tensor) -> Tensor:
        """``[T]`` bool to ``[N]`` int64: the tokens in ``mask``."""
        return self.sum(mask.to(torch.int64))

    def spread(self, per_sequence: Tensor) -> Tensor:
        """``[N]`` to ``[T]``: every token gets its sequence's value."""
        return per_sequence[self.ids]

    def last(self, mask: Tensor) -> Tensor:
        """``[T]`` bool: the last token in ``mask`` of each sequence."""
        positions = torch.arange(len(self.ids), device=self.ids.device)
        newest = positions.new_full((len(self),), -1)
        newest = newest.scatter_reduce(0, self.ids, torch.where(mask, positions, -1), reduce="amax")
        return mask & (self.spread(newest) == positions)

    def scan_backwards(self, step: Callable[[Tensor, Tensor], Tensor], state: Tensor) -> Tensor:
        """Run a recursion from the last token of every sequence to its first, all at once.

        Args:
            step: Called with flat token indexes ``[M]`` (at most one per sequence) and the state
                of their sequences ``[M, ...]``; returns their new state.
            state: ``[N, ...]`` state behind the last token.

        Returns:
            The state of each sequence in front of its first token.
        """
        ends = torch.cumsum(self.lengths, 0)
        longest = int(self.lengths.max()) if len(self) else 0
        for back in range(1, longest + 1):
            rows = torch.nonzero(self.lengths >= back).squeeze(1)
            state = state.index_copy(0, rows, step(ends[rows] - back, state[rows]))
        return state


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``. From pageable memory it would wait for all that a GPU still computes."""
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
