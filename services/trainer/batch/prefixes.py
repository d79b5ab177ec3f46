"""Common prefixes of sequences, which a pack holds only once.

Sequences are sorted by their tokens. The longest prefix that a sequence shares with any earlier sequence is
then the one that it shares with its predecessor. The tokens after that prefix are the branch of the sequence.
The branches of all sequences, in this order, are the trie of the sequences, depth first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.wire.data.model_inputs import ModelInputs

_ID_BITS = 32
_LEAST_SHARE = 1 / 50
"""Sharing less than this part of a sequence, or of a pack, costs attention more than it saves elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class InputSpan:
    """Model inputs of some tokens of a sequence: of its prompt, or of a turn that it observed later."""

    start: int
    """First of these tokens. Earlier tokens do not depend on the inputs."""
    end: int
    """End of these tokens, which are shared as a whole or not at all: any of them may use the inputs."""
    inputs: ModelInputs


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Common prefixes of some sequences."""

    order: tuple[int, ...]
    """Indexes of the sequences, sorted by their tokens."""
    shared: tuple[int, ...]
    """Length of the prefix that each sequence, in this order, has in common with its predecessor."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Position of a sequence in a pack."""

    path: NDArray[np.int64]
    """``[L]`` place of each of its tokens in the pack."""
    length: int
    """Number of its last tokens that no earlier sequence has; they are contiguous in the pack."""

    @property
    def depth(self) -> int:
        """Number of tokens that it shares with earlier sequences."""
        return len(self.path) - self.length


def sharing_keys(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    experts: Sequence[Tensor] | None = None,
    inputs: Sequence[Sequence[InputSpan]] = (),
) -> list[NDArray[np.int64]]:
    """Concatenates prompts and responses to int64 keys, which are equal only for tokens that can be shared.

    :func:`token_ids` extracts the token ids.

    Args:
        prompts: ``[P]`` token ids each.
        responses: ``[R]`` token ids each.
        experts: ``[P + R - 1, layers, K]`` each, if known: a token that passes other experts has other
            hidden states and cannot be shared. The upper bits of a key are a digest of them.
        inputs: Model inputs of each sequence, in the order of their tokens; empty if the run has none. The
            upper bits of the key of a span's first token number the distinct pairs of tokens and inputs.
    """
    sequences = [
        np.concatenate([prompt.numpy(), response.numpy()]).astype(np.int64)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if experts is not None:
        for sequence, rows in zip(sequences, experts, strict=True):
            sequence[: len(rows)] |= _digests(rows) << _ID_BITS
    numbers: dict[tuple[str, bytes], int] = {}
    for sequence, spans in zip(sequences, inputs, strict=False):
        for span in spans:
            content = (span.inputs.digest, sequence[span.start : span.end].tobytes())
            number = numbers.setdefault(content, len(numbers) + 1)
            sequence[span.start] = token_ids(sequence[span.start]) | number << _ID_BITS
    return sequences


def token_ids(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Extracts the token ids from the keys of :func:`sharing_keys`."""
    return tokens & ((1 << _ID_BITS) - 1)


def _digests(experts: Tensor) -> NDArray[np.int64]:
    """Returns ``[n]`` 31-bit hashes of rows.

    The row's words are multiplied by odd numbers and summed. The hash is the upper bits of the sum, which
    depend on the most words.
    """
    rows = np.ascontiguousarray(experts.numpy()).reshape(len(experts), -1).view(np.uint8)
    words = -(-rows.shape[1] // 8)
    padded = np.zeros((len(rows), 8 * words), np.uint8)
    padded[:, : rows.shape[1]] = rows
    factors = np.random.default_rng(0).integers(1 << 63, size=words, dtype=np.uint64) * 2 + 1
    products: NDArray[np.uint64] = (padded.view(np.uint64) * factors).sum(1)
    return (products >> np.uint64(33)).astype(np.int64)


def find_prefixes(sequences: Sequence[NDArray[np.int64]]) -> Prefixes:
    """Sorts sequences so that those that share tokens are adjacent."""
    # Big-endian bytes sort like the numbers.
    keys = [sequence.astype(">u8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    neighbours = pairwise(sequences[index] for index in order)
    shared = [0, *(_common(before, after) for before, after in neighbours)]
    return Prefixes(tuple(order), tuple(shared[: len(order)]))


def unshared(num_sequences: int) -> Prefixes:
    """Returns sequences in their given order, as if they had nothing in common."""
    return Prefixes(tuple(range(num_sequences)), (0,) * num_sequences)


def worthwhile(sequences: Sequence[NDArray[np.int64]]) -> Prefixes:
    """Returns the common prefixes of a pack's sequences, or none if sharing saves little."""
    prefixes = find_prefixes(sequences)
    total = sum(map(len, sequences))
    return prefixes if sum(prefixes.shared) > _LEAST_SHARE * total else unshared(len(sequences))


def families(prefixes: Prefixes, lengths: Sequence[int]) -> list[Prefixes]:
    """Cuts sorted sequences into families whose neighbours share a substantial prefix."""
    starts = [0]
    for index in range(1, len(prefixes.order)):
        before, after = prefixes.order[index - 1 : index + 1]
        if prefixes.shared[index] <= _LEAST_SHARE * min(lengths[before], lengths[after]):
            starts.append(index)
    ends = [*starts[1:], len(prefixes.order)]
    return [part(prefixes, start, end) for start, end in zip(starts, ends, strict=True)]


def part(prefixes: Prefixes, start: int, end: int) -> Prefixes:
    """Returns a range of the sorted sequences; its first sequence shares nothing."""
    return Prefixes(prefixes.order[start:end], (0, *prefixes.shared[start + 1 : end]))


def branches(prefixes: Prefixes, lengths: Sequence[int]) -> list[Branch]:
    """Lays the sequences out in a pack, in their order.

    Args:
        prefixes: Common prefixes of the sequences; at least one sequence.
    """
    result, path, end = [], np.zeros(0, np.int64), 0
    for index, shared in zip(prefixes.order, prefixes.shared, strict=True):
        start, end = end, end + lengths[index] - shared
        path = np.concatenate([path[:shared], np.arange(start, end)])
        result.append(Branch(path, end - start))
    return result


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Returns the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differences = np.flatnonzero(first[:length] != second[:length])
    return int(differences[0]) if len(differences) else length
