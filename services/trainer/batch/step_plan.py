"""Work plan of a step: division of a batch into updates, ranks and micro-batches.

The division among ranks follows from the lengths of all samples, which every rank knows. A rank divides its
samples into micro-batches by their tokens, which only that rank has.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.batch.prefixes import (
    Prefixes,
    families,
    find_prefixes,
    part,
    sharing_keys,
    unshared,
)
from services.trainer.batch.samples import BatchFacts, Samples
from services.trainer.collectives import Ranks


@dataclass(frozen=True, slots=True)
class RankShard:
    """A rank's samples of a step."""

    rows: tuple[int, ...]
    """Indexes of the rank's samples in the whole batch."""
    updates: tuple[tuple[int, ...], ...]
    """Samples of each optimizer update, by position in ``rows``."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one rank in a step."""

    updates: tuple[tuple[tuple[int, ...], ...], ...]
    """Micro-batches of each optimizer update, each a tuple of positions in the rank's sequences. All ranks
    have the same number of micro-batches; a rank without work has empty ones.
    """
    left_out: tuple[int, ...] = ()
    """Positions of the sequences that do not fit into memory."""

    def without(self, positions: Collection[int]) -> "StepPlan":
        """Returns the same micro-batches without some sequences."""
        left_out = set(positions)
        updates = tuple(
            tuple(tuple(i for i in micro if i not in left_out) for micro in micros)
            for micros in self.updates
        )
        return StepPlan(updates, left_out=tuple(sorted(left_out.union(self.left_out))))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the tokens that are computed at once."""

    max_tokens: int = sys.maxsize
    """Max tokens of a micro-batch of several sequences, counting shared tokens once."""
    too_long: int = sys.maxsize
    """Min tokens of a sequence, or of a group that stays together, that does not fit even alone."""

    def intersection(self, bounds: "Bounds") -> "Bounds":
        """Returns the stricter of both limits."""
        return Bounds(min(self.max_tokens, bounds.max_tokens), min(self.too_long, bounds.too_long))


def shard_of(
    facts: BatchFacts,
    *,
    num_updates: int,
    rank: int,
    num_ranks: int,
    cost: Callable[[int], float] = float,
    shares_prefixes: bool,
    keeps_groups: bool = False,
) -> RankShard:
    """Splits a batch into updates by whole groups, then over ranks by cost; returns one rank's shard.

    A batch of fewer groups than updates has one update for each group.

    Args:
        cost: Returns the relative cost of a sequence of a given length.
        shares_prefixes: True if a prompt is computed once for those members of its group that are on one
            rank; members then stay together, as far as that balances the ranks.
        keeps_groups: True if members stay together at any cost.
    """
    num_groups = int(facts.groups.max()) + 1
    num_updates = min(num_updates, num_groups)
    groups = facts.groups.tolist()
    rows: list[int] = []
    updates = []
    for update in range(num_updates):
        first = update * num_groups // num_updates
        last = (update + 1) * num_groups // num_updates
        members: list[list[int]] = [[] for _ in range(first, last)]
        for index, group in enumerate(groups):
            if first <= group < last:
                members[group - first].append(index)
        if not (shares_prefixes or keeps_groups):
            members = [[index] for group in members for index in group]
        dealt = _deal(facts, members, num_ranks, cost, divides=not keeps_groups)[rank]
        updates.append(tuple(range(len(rows), len(rows) + len(dealt))))
        rows += dealt
    return RankShard(rows=tuple(rows), updates=tuple(updates))


def plan_step(
    share: RankShard, samples: Samples, *, bounds: Bounds, ranks: Ranks, shares_prefixes: bool
) -> StepPlan:
    """Divides a rank's samples into micro-batches. All ranks must call it.

    Args:
        samples: This rank's samples, in the order of ``share.rows``; the sequences of one sample may be
            divided.
        bounds: Token budget of a micro-batch, and sizes that are known to exceed memory.
        shares_prefixes: True if tokens that samples of a micro-batch have in common count once.
    """
    lengths = (samples.prompts.lengths + samples.responses.lengths).tolist()
    sizes, owners = _undivided(samples), samples.by_sample.ids.tolist()
    divided = []
    for members in map(set, share.updates):
        positions = [
            index
            for index, owner in enumerate(owners)
            if owner in members and sizes[index] < bounds.too_long
        ]
        micros = cut(samples, positions, max_tokens=bounds.max_tokens, shares=shares_prefixes)
        # Ascending sizes: ranks then compute similar sizes at a time, and the first size that exceeds
        # memory is the smallest one.
        divided.append(sorted(micros, key=lambda micro: sum(lengths[i] for i in micro)))
    # An update without work still has one micro-batch.
    max_micros = ranks.max(torch.tensor([max(1, len(micros)) for micros in divided])).tolist()
    updates = zip(divided, max_micros, strict=True)
    return StepPlan(
        tuple((*micros, *[()] * (count - len(micros))) for micros, count in updates),
        left_out=tuple(i for i, size in enumerate(sizes) if size >= bounds.too_long),
    )


def cut(
    samples: Samples, positions: Sequence[int], *, max_tokens: int, shares: bool
) -> list[tuple[int, ...]]:
    """Divides some of the sequences into micro-batches of positions; see :func:`micro_batches`."""
    rows = torch.as_tensor(positions, dtype=torch.int64)
    groups = None if samples.groups is None else samples.groups[rows].tolist()
    # ``unbind`` returns views; ``select`` would copy the experts, which are many times larger than tokens.
    experts = samples.experts.unbind() if shares and samples.experts is not None else None
    sequences = sharing_keys(
        samples.prompts.select(rows).unbind(),
        samples.responses.select(rows).unbind(),
        None if experts is None else [experts[position] for position in positions],
        [samples.inputs[position] for position in positions] if samples.inputs else [],
    )
    micros = micro_batches(sequences, max_tokens, shares=shares, groups=groups)
    return [tuple(positions[index] for index in micro) for micro in micros]


def num_tokens(samples: Samples) -> int:
    """Counts the tokens of all sequences, including shared ones."""
    return int(samples.prompts.lengths.sum() + samples.responses.lengths.sum())


def bounds_of(samples: Samples, *, shares: bool) -> Bounds:
    """Returns limits that exclude a micro-batch of this size."""
    tokens, everything = num_tokens(samples), range(len(samples.rows))
    if len(cut(samples, everything, max_tokens=1, shares=shares)) == 1:
        return Bounds(too_long=tokens)
    budget = max(1, tokens // 2)
    while len(cut(samples, everything, max_tokens=budget, shares=shares)) == 1:
        budget = max(1, budget // 2)
    return Bounds(max_tokens=budget)


def _undivided(samples: Samples) -> list[int]:
    """Returns for each sequence the tokens that stay together: its own, or those of its group."""
    lengths = samples.prompts.lengths + samples.responses.lengths
    if samples.groups is not None:
        _, groups = torch.unique(samples.groups, return_inverse=True)
        lengths = torch.bincount(groups, lengths).long()[groups] if len(groups) else lengths
    sizes: list[int] = lengths.tolist()
    return sizes


def micro_batches(
    sequences: Sequence[NDArray[np.int64]],
    max_tokens: int,
    *,
    shares: bool,
    groups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Packs sequences into micro-batches: as few as first-fit-decreasing needs, then of similar size.

    Sequences that share tokens stay together, as far as the budget allows. A remainder much smaller than the
    other micro-batches would leave the device idle, and might need other compiled code. A sequence longer
    than ``max_tokens`` gets its own micro-batch.

    Args:
        shares: True if common prefixes of sequences count once.
        groups: Group of each sequence, if groups stay together even when larger than ``max_tokens``.

    Returns:
        Indexes of the sequences of each micro-batch.
    """
    lengths = [len(sequence) for sequence in sequences]
    if groups is not None:
        units = _whole_groups(sequences, groups, shares=shares)
    elif shares and sequences:
        trees = families(find_prefixes(sequences), lengths)
        units = [unit for family in trees for unit in _evenly_cut(family, lengths, max_tokens)]
    else:
        units = [Prefixes((index,), (0,)) for index in range(len(sequences))]
    sizes = [_num_tokens(unit, lengths) for unit in units]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        bin_index = next((b for b, free in enumerate(room) if sizes[index] <= free), None)
        if bin_index is None:
            bins.append([index])
            room.append(max_tokens - sizes[index])
        else:
            bins[bin_index].append(index)
            room[bin_index] -= sizes[index]
    even = _balance(sizes, len(bins))
    if all(sum(sizes[index] for index in members) <= max_tokens for members in even):
        bins = even
    return [sorted(i for index in members for i in units[index].order) for members in bins]


def _whole_groups(
    sequences: Sequence[NDArray[np.int64]], groups: Sequence[int], *, shares: bool
) -> list[Prefixes]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    units = []
    for rows in members.values():
        tree = find_prefixes([sequences[i] for i in rows]) if shares else unshared(len(rows))
        units.append(Prefixes(tuple(rows[row_index] for row_index in tree.order), tree.shared))
    return units


def _deal(
    facts: BatchFacts,
    groups: list[list[int]],
    num_ranks: int,
    cost: Callable[[int], float],
    *,
    divides: bool,
) -> list[list[int]]:
    """Returns the samples of each rank: whole groups, or parts of groups if ``divides``.

    Parts are halved until they are single samples; the division with the least max load of a rank is used,
    and of equal ones that with the largest parts.
    """

    def work(unit: Sequence[int]) -> float:
        common = cost(min(facts.prompt_lengths[index] for index in unit)) if len(unit) > 1 else 0.0
        return common + sum(cost(facts.lengths[index]) - common for index in unit)

    dealt, least, num_parts = None, 0.0, 1
    most_parts = 2 * max(map(len, groups)) if divides and num_ranks > 1 else 1
    while dealt is None or num_parts < most_parts:
        units = [cut_unit for group in groups for cut_unit in _parts(group, num_parts)]
        costs = [work(unit) for unit in units]
        shares = _balance(costs, num_ranks)
        load = max(sum(costs[index] for index in share) for share in shares)
        if dealt is None or load < least:
            dealt = [sorted(i for index in share for i in units[index]) for share in shares]
            least = load
        num_parts *= 2
    return dealt


def _parts(members: list[int], count: int) -> list[list[int]]:
    size = -(-len(members) // count)
    return [members[start : start + size] for start in range(0, len(members), size)]


def _balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Distributes items so that summed costs are close: most expensive first, to the least loaded part."""
    shares: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, 0, number) for number in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, least = loads[0]
        heapreplace(loads, (load + costs[index], count + 1, least))
        shares[least].append(index)
    return shares


def _num_tokens(prefixes: Prefixes, lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in prefixes.order) - sum(prefixes.shared)


def _evenly_cut(family: Prefixes, lengths: Sequence[int], max_tokens: int) -> list[Prefixes]:
    """Cuts a family into as few parts as fit the budget, of similar size."""
    count = len(_cut(family, lengths, max_tokens))
    if count == 1:
        return [family]
    budgets = range(1, max_tokens)
    least = bisect_left(budgets, True, key=lambda b: len(_cut(family, lengths, b)) <= count)
    return _cut(family, lengths, least + 1)


def _cut(family: Prefixes, lengths: Sequence[int], max_tokens: int) -> list[Prefixes]:
    """Cuts a family into parts within a budget.

    Each cut is in the second half of what fits, between the neighbours that share the fewest tokens.
    """
    cuts, start, end = [], 0, len(family.order)
    while start < end:
        stop, tokens = start + 1, lengths[family.order[start]]
        while stop < end:
            tokens += lengths[family.order[stop]] - family.shared[stop]
            if tokens > max_tokens:
                break
            stop += 1
        if stop < end:
            halfway = (start + stop) // 2 + 1
            stop = min(range(stop, halfway - 1, -1), key=family.shared.__getitem__)
        cuts.append(part(family, start, stop))
        start = stop
    return cuts
