"""Sequences without padding: per-sequence sums, means and recursions over flat tokens.

Tokens of all sequences are concatenated in ``[T]`` tensors. A :class:`Segments` describes the boundaries of
sequences; all other mathematics of the trainer works on the flat tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Assignment of the tokens of a flat ``[T]`` tensor to sequences."""

    lengths: Tensor
    """``[N]`` int64, tokens per sequence."""
    ids: Tensor
    """``[T]`` int64, index of each token's sequence."""

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "Segments":
        """Creates segments of the given ``[N]`` lengths."""
        lengths = lengths.to(torch.int64)
        positions = torch.arange(len(lengths), device=lengths.device)
        return cls(lengths=lengths, ids=torch.repeat_interleave(positions, lengths))

    def to(self, device: torch.device) -> "Segments":
        """Returns a copy on ``device``; creating it there would wait for the device's pending work."""
        return Segments(on_device(self.lengths, device), on_device(self.ids, device))

    def __len__(self) -> int:
        return len(self.lengths)

    def sum(self, values: Tensor) -> Tensor:
        """Sums ``[T]`` values over each sequence to ``[N]``, 0 for an empty one."""
        return values.new_zeros(len(self)).index_add(0, self.ids, values)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Averages ``[T]`` values in ``mask`` over each sequence to ``[N]``, 0 if a sequence has none."""
        weights = mask.to(values.dtype)
        # A masked value may be infinite or NaN, so it is replaced instead of multiplied by 0.
        return self.sum(torch.where(mask, values, 0.0)) / self.sum(weights).clamp(min=1.0)

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Takes the maximum of ``[T]`` values in ``mask`` over each sequence to ``[N]``, -inf for none."""
        lowest = values.new_full((len(self),), -torch.inf)
        masked = torch.where(mask, values, -torch.inf)
        return lowest.scatter_reduce(0, self.ids, masked, reduce="amax")

    def count(self, mask: Tensor) -> Tensor:
        """Counts the tokens in ``mask`` of each sequence: ``[T]`` bool to ``[N]`` int64."""
        return self.sum(mask.to(torch.int64))

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Expands ``[N]`` to ``[T]``: every token gets its sequence's value."""
        return per_sequence[self.ids]

    def last(self, mask: Tensor) -> Tensor:
        """Returns ``[T]`` bool: the last token in ``mask`` of each sequence."""
        positions = torch.arange(len(self.ids), device=self.ids.device)
        newest = positions.new_full((len(self),), -1)
        newest = newest.scatter_reduce(0, self.ids, torch.where(mask, positions, -1), reduce="amax")
        return mask & (self.expand(newest) == positions)

    def scan_backwards(self, step: Callable[[Tensor, Tensor], Tensor], state: Tensor) -> Tensor:
        """Runs a recursion from the last token to the first of all sequences at once.

        Args:
            step: Called with flat token indexes ``[M]`` (at most one per sequence) and the state
                of their sequences ``[M, ...]``; returns their new state.
            state: ``[N, ...]`` initial state, after the last token.

        Returns:
            The state of each sequence after its first token is processed.
        """
        ends = torch.cumsum(self.lengths, 0)
        longest = int(self.lengths.max()) if len(self) else 0
        for back in range(1, longest + 1):
            rows = torch.nonzero(self.lengths >= back).squeeze(1)
            state = state.index_copy(0, rows, step(ends[rows] - back, state[rows]))
        return state


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to ``device`` through pinned memory; else it would wait for the GPU's work."""
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
