"""Which samples go to which rank and micro-batch, and how a micro-batch is laid out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.jagged import Jagged
from services.trainer.model.attention import AttentionLayout, build_layout
from services.trainer.transfer import on_device


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal samples to ranks so that the summed costs are close: largest first, to the least loaded.

    Args:
        costs: Cost of each sample.
        num_ranks: Data-parallel ranks.

    Returns:
        Ascending sample indexes of each rank.
    """
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], len(shares[r]), r))
        loads[rank] += costs[index]
        shares[rank].append(index)
    return [sorted(share) for share in shares]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack samples into micro-batches: longest first, into the first one with room.

    A sample longer than ``max_tokens`` is a micro-batch of its own.

    Args:
        lengths: Tokens of each sample.
        max_tokens: Token budget of a micro-batch.

    Returns:
        Sample indexes of each micro-batch.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            bins.append([index])
            room.append(max_tokens - lengths[index])
        else:
            bins[place].append(index)
            room[place] -= lengths[index]
    return [sorted(members) for members in bins]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Prompts and responses of a micro-batch, laid end to end.

    The last token of each sequence is left out, because nothing is predicted from it.
    """

    input_ids: Tensor
    """``[T]`` int64."""
    position_ids: Tensor
    """``[T]`` int64, from 0 in each sequence."""
    predictors: Tensor
    """``[R]`` int64: position from which each response token is predicted."""
    targets: Tensor
    """``[R]`` int64 response tokens."""
    layout: AttentionLayout
    """Boundaries for the attention."""


def pack(prompts: Jagged, responses: Jagged, *, device: torch.device) -> PackedTokens:
    """Lay out prompts and their responses.

    Args:
        prompts: ``N`` rows of token ids, each with at least one token.
        responses: ``N`` rows of token ids.
        device: Of the model.

    Raises:
        ValueError: If a prompt is empty, so that its first response token has no predictor.
    """
    if len(prompts.lengths) and int(prompts.lengths.min()) < 1:
        raise ValueError("a prompt has no token; a response needs at least one to follow")
    totals = prompts.lengths + responses.lengths
    starts = torch.cumsum(totals, 0) - totals
    whole = torch.empty(int(totals.sum()), dtype=torch.int64)
    whole[_places(starts, prompts.lengths)] = prompts.values.to(torch.int64)
    response_places = _places(starts + prompts.lengths, responses.lengths)
    targets = responses.values.to(torch.int64)
    whole[response_places] = targets
    lengths = totals - 1
    if int(lengths.sum()) == 0:
        # Nothing is predicted, but a model cannot run on nothing, and other ranks may wait for it.
        return _one_idle_token(device)
    # Sequence i moves i places to the front, because i last tokens before it are gone.
    owners = torch.repeat_interleave(torch.arange(len(totals)), responses.lengths)
    kept = torch.ones(len(whole), dtype=torch.bool)
    kept[starts + totals - 1] = False
    new_starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(new_starts, lengths)
    return PackedTokens(
        input_ids=on_device(whole[kept], device),
        position_ids=on_device(positions, device),
        predictors=on_device(response_places - 1 - owners, device),
        targets=on_device(targets, device),
        layout=build_layout(lengths.tolist(), device),
    )


def _one_idle_token(device: torch.device) -> PackedTokens:
    """A pack from which nothing is predicted."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedTokens(
        input_ids=zero,
        position_ids=zero,
        predictors=zero[:0],
        targets=zero[:0],
        layout=build_layout([1], device),
    )


def _places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Positions ``starts[i] .. starts[i] + lengths[i] - 1`` of all rows, laid end to end."""
    offsets = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - offsets, lengths)
