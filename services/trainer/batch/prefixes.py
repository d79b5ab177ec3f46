"""Tokens that sequences have in common, from their beginnings on: a pack holds them once.

Sorted by their tokens, each sequence shares with all before it what it shares with its neighbour. What it has
beyond that is its branch; the branches of all, in that order, are the trie of the sequences, depth first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_ID_BITS = 32
_LEAST_SHARE = 1 / 50
"""Sharing less of a sequence, or of a pack, costs attention more than it saves elsewhere."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What sequences share."""

    order: tuple[int, ...]
    """The sequences, sorted by their tokens."""
    shared: tuple[int, ...]
    """First tokens that each one, in that order, has in common with the one before it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a sequence lies in a pack."""

    path: NDArray[np.int64]
    """``[L]`` place of each of its tokens."""
    length: int
    """Last ones of these that no earlier sequence has; they follow one another in the pack."""

    @property
    def depth(self) -> int:
        """Tokens that it shares with earlier ones."""
        return len(self.path) - self.length


def joined(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    experts: Sequence[Tensor] | None = None,
) -> list[NDArray[np.int64]]:
    """What tells tokens of prompts and their responses apart: their ids, which :func:`token_ids` gives.

    Args:
        prompts: ``[P]`` token ids each.
        responses: ``[R]`` token ids each.
        experts: ``[P + R - 1, layers, K]`` each, if they are told: a token that goes through other experts
            has other states, and is another one. A digest of them is in the upper bits.
    """
    sequences = [
        np.concatenate([prompt.numpy(), response.numpy()]).astype(np.int64)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if experts is not None:
        for sequence, rows in zip(sequences, experts, strict=True):
            sequence[: len(rows)] |= _digests(rows) << _ID_BITS
    return sequences


def token_ids(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of tokens that :func:`joined` tells apart."""
    return tokens & ((1 << _ID_BITS) - 1)


def _digests(experts: Tensor) -> NDArray[np.int64]:
    """``[n]`` 31 bits of each row: a sum of its words times odd numbers, whose upper bits are mixed best."""
    rows = np.ascontiguousarray(experts.numpy()).reshape(len(experts), -1).view(np.uint8)
    words = -(-rows.shape[1] // 8)
    padded = np.zeros((len(rows), 8 * words), np.uint8)
    padded[:, : rows.shape[1]] = rows
    factors = np.random.default_rng(0).integers(1 << 63, size=words, dtype=np.uint64) * 2 + 1
    mixed: NDArray[np.uint64] = (padded.view(np.uint64) * factors).sum(1)
    return (mixed >> np.uint64(33)).astype(np.int64)


def find_prefixes(sequences: Sequence[NDArray[np.int64]]) -> Prefixes:
    """Sort sequences so that those that share tokens lie together."""
    # The order of big-endian bytes is that of the numbers.
    keys = [sequence.astype(">u8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    neighbours = pairwise(sequences[index] for index in order)
    shared = [0, *(_common(before, after) for before, after in neighbours)]
    return Prefixes(tuple(order), tuple(shared[: len(order)]))


def unshared(num_sequences: int) -> Prefixes:
    """Sequences in the order in which they are, as if they had nothing in common."""
    return Prefixes(tuple(range(num_sequences)), (0,) * num_sequences)


def worthwhile(sequences: Sequence[NDArray[np.int64]]) -> Prefixes:
    """What sequences of one pack share, or nothing where that is little."""
    prefixes = find_prefixes(sequences)
    total = sum(map(len, sequences))
    return prefixes if sum(prefixes.shared) > _LEAST_SHARE * total else unshared(len(sequences))


def families(prefixes: Prefixes, lengths: Sequence[int]) -> list[Prefixes]:
    """Cut sequences into those that share a good part with the next, in their order.

    Args:
        prefixes: What they share.
        lengths: Tokens of each sequence, by its index.
    """
    starts = [0]
    for place in range(1, len(prefixes.order)):
        before, after = prefixes.order[place - 1 : place + 1]
        if prefixes.shared[place] <= _LEAST_SHARE * min(lengths[before], lengths[after]):
            starts.append(place)
    ends = [*starts[1:], len(prefixes.order)]
    return [part(prefixes, start, end) for start, end in zip(starts, ends, strict=True)]


def part(prefixes: Prefixes, start: int, end: int) -> Prefixes:
    """Some of the sorted sequences, the first of which shares nothing."""
    return Prefixes(prefixes.order[start:end], (0, *prefixes.shared[start + 1 : end]))


def branches(prefixes: Prefixes, lengths: Sequence[int]) -> list[Branch]:
    """Lay the sequences out in a pack, in their order.

    Args:
        prefixes: What they share; at least one sequence.
        lengths: Tokens of each sequence, by its index.
    """
    found, path, end = [], np.zeros(0, np.int64), 0
    for index, shared in zip(prefixes.order, prefixes.shared, strict=True):
        start, end = end, end + lengths[index] - shared
        path = np.concatenate([path[:shared], np.arange(start, end)])
        found.append(Branch(path, end - start))
    return found


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """First tokens that two sequences have in common."""
    length = min(len(one), len(other))
    differences = np.flatnonzero(one[:length] != other[:length])
    return int(differences[0]) if len(differences) else length
