"""Attention layout of a pack, in the forms that the attention kernels need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from services.trainer.batch.prefixes import Branch
from services.trainer.batch.segments import on_device

_MAX_PADDING = 1.25
"""Max ratio of a batch's padded size to the tokens of its sequences."""
_MAX_COPIES = 8
"""Max ratio of copied keys to the keys of a pack, for sequences that share them."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Branches of similar length as rows of one batch, whose padded places repeat token 0."""

    queries: Tensor
    """``[B, L]`` int64 places of each branch's tokens."""
    keys: Tensor | None
    """``[B, K]`` int64 places of the keys of its last token; None if they are the branch itself."""
    depths: Tensor
    """``[B, L]`` int64: position of each query in its sequence, at most its last."""
    visible: dict[int | None, Tensor] = field(default_factory=dict)
    """``[B, 1, L, K]`` bool by window: keys that each query sees; computed on first use by a layer."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Keys of a pack whose sequences share tokens: the keys of each sequence, laid end to end."""

    places: Tensor
    """``[K]`` int64 place of each key in the pack."""
    cu_lengths: Tensor
    """``[N + 1]`` int32 offsets of the sequences, and the total."""
    max_length: int
    """Tokens of the longest sequence."""
    are_many: bool
    """True if there are too many to copy."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Whole sequences of a pack laid end to end, for layers that carry a state from token to token."""

    places: Tensor | None
    """``[K]`` int64 place of each of their tokens in the pack; None if they are the pack itself."""
    positions: Tensor | None
    """``[T]`` int64: place of each token of the pack among them; None if they are the pack itself."""
    cu_lengths: Tensor
    """``[N + 1]`` int64 offsets of the sequences, and the total."""
    depths: Tensor
    """``[K]`` int64: position of each token in its sequence."""


# Not frozen: torch 2.11 guards every field of a frozen dataclass that enters a compiled checkpoint
# (``activation_checkpointing: selective``), so it compiled another graph for each number of batches.
@dataclass(slots=True, eq=False)
class AttentionLayout:
    """Branches of a pack and their keys: shared prefixes of their sequences and the branches themselves."""

    cu_lengths: Tensor
    """``[N + 1]`` int32 offsets of the branches, and the total."""
    max_length: int
    """Tokens of the longest branch."""
    paths: Paths | None
    """Keys of each branch; None if nothing is shared, so that its keys are its own tokens."""
    ends: Tensor
    """``[T]`` int64: place after the last token that attends to each token; all tokens between do, too."""
    depths: Tensor
    """``[T]`` int64: position of each token in its sequence."""
    batches: tuple[AttentionBatch, ...]
    """All branches."""
    gather: Tensor
    """``[T]`` int64: place of each token in the batches, laid end to end."""
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """Block masks of the flex kernel, by window; computed on first use by a layer."""
    whole: list[Sequences] = field(default_factory=list)
    """Result of :meth:`sequences`, once it is computed."""

    def sequences(self) -> Sequences:
        """Returns the sequences, each with the prefix that it shares; the same object for all layers."""
        if not self.whole:
            self.whole.append(self._sequences())
        return self.whole[0]

    def _sequences(self) -> Sequences:
        if self.paths is None:
            return Sequences(None, None, self.cu_lengths.long(), self.depths)
        ends, offsets = self.paths.cu_lengths.long(), self.cu_lengths.long()
        lengths, indices = ends.diff(), torch.arange(len(self.paths.places), device=ends.device)
        depths = indices - ends[:-1].repeat_interleave(lengths, output_size=len(indices))
        # A branch is the end of its sequence.
        shift = (ends[1:] - offsets[1:]).repeat_interleave(
            offsets.diff(), output_size=len(self.depths)
        )
        positions = torch.arange(len(self.depths), device=ends.device) + shift
        return Sequences(self.paths.places, positions, ends, depths)


def build_layout(branches: Sequence[Branch], device: torch.device) -> AttentionLayout:
    """Builds the attention layout of a pack.

    Args:
        branches: Branches in the order of the pack, depth first.
    """
    branches = [branch for branch in branches if branch.length]
    lengths = [branch.length for branch in branches]
    ends, depths = _ends_and_depths(branches)
    batches, gather = _batches(branches, device)
    return AttentionLayout(
        cu_lengths=on_device(_offsets(lengths), device),
        max_length=max(lengths),
        paths=_paths(branches, device) if any(branch.depth for branch in branches) else None,
        ends=on_device(ends, device),
        depths=on_device(depths, device),
        batches=batches,
        gather=on_device(gather, device),
    )


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _paths(branches: Sequence[Branch], device: torch.device) -> Paths:
    paths = np.concatenate([branch.path for branch in branches])
    lengths = [len(branch.path) for branch in branches]
    return Paths(
        places=on_device(torch.from_numpy(paths), device),
        cu_lengths=on_device(_offsets(lengths), device),
        max_length=max(lengths),
        are_many=len(paths) > _MAX_COPIES * sum(branch.length for branch in branches),
    )


def _ends_and_depths(branches: Sequence[Branch]) -> tuple[Tensor, Tensor]:
    """Returns ``ends`` and ``depths`` of a layout."""
    total = sum(branch.length for branch in branches)
    ends, depths = np.empty(total, np.int64), np.empty(total, np.int64)
    # By depth: start of the first later branch whose own tokens begin at this depth or before it.
    next_ends = np.full(max(len(branch.path) for branch in branches), total)
    for branch in reversed(branches):
        positions = branch.path[branch.depth :]
        ends[positions] = next_ends[branch.depth : len(branch.path)]
        depths[positions] = np.arange(branch.depth, len(branch.path))
        next_ends[branch.depth :] = positions[0]
    return torch.from_numpy(ends), torch.from_numpy(depths)


def _batches(
    branches: Sequence[Branch], device: torch.device
) -> tuple[tuple[AttentionBatch, ...], Tensor]:
    """Returns ``batches`` and ``gather`` of a layout."""
    gather = np.empty(sum(branch.length for branch in branches), np.int64)
    batches, filled = [], 0
    for rows in _group_similar(branches):
        members = [branches[row] for row in rows]
        width = max(branch.length for branch in members)
        queries = np.zeros((len(members), width), np.int64)
        keys = np.zeros((len(members), max(len(branch.path) for branch in members)), np.int64)
        depths = np.empty_like(queries)
        for row, branch in enumerate(members):
            positions = branch.path[branch.depth :]
            queries[row, : branch.length] = positions
            keys[row, : len(branch.path)] = branch.path
            depths[row] = np.minimum(np.arange(width) + branch.depth, len(branch.path) - 1)
            gather[positions] = np.arange(branch.length) + (filled + row * width)
        is_shared = any(branch.depth for branch in members)
        batches.append(
            AttentionBatch(
                queries=on_device(torch.from_numpy(queries), device),
                keys=on_device(torch.from_numpy(keys), device) if is_shared else None,
                depths=on_device(torch.from_numpy(depths), device),
            )
        )
        filled += queries.size
    return tuple(batches), torch.from_numpy(gather)


def _group_similar(branches: Sequence[Branch]) -> list[list[int]]:
    """Groups branches, longest first, so that no batch has too much padding of queries or of keys."""
    order = sorted(
        range(len(branches)),
        key=lambda index: (
            branches[index].depth > 0,
            -branches[index].length,
            -branches[index].depth,
        ),
    )
    groups: list[list[int]] = []
    queries = keys = width = reach = 0
    for index in order:
        branch = branches[index]
        queries, keys = queries + branch.length, keys + len(branch.path)
        reach = max(reach, len(branch.path))
        rows = len(groups[-1]) + 1 if groups else 0
        if (
            not groups
            or (branch.depth > 0) != (branches[groups[-1][0]].depth > 0)
            or width * rows > _MAX_PADDING * queries
            or reach * rows > _MAX_PADDING * keys
        ):
            groups.append([])
            queries, keys = branch.length, len(branch.path)
            width, reach = queries, keys
        groups[-1].append(index)
    return groups
