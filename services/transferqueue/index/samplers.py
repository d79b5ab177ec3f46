"""Which ready samples a consumer gets. Pure functions over candidates in the order of arrival."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready sample, as a sampler sees it."""

    index: int
    """Place in the queue."""
    group_id: str
    """Its group."""
    v_min: int
    """Oldest weight version that made it."""


def fifo(candidates: Iterable[Candidate], count: int) -> list[int] | None:
    """The ``count`` oldest samples; None if there are fewer."""
    chosen: list[int] = []
    for candidate in candidates:
        chosen.append(candidate.index)
        if len(chosen) == count:
            return chosen
    return None


def whole_groups(
    candidates: Iterable[Candidate], count: int, *, group_size: int
) -> list[int] | None:
    """The ``count`` samples of the groups that were complete first; None if there are fewer.

    Members are found by group id, never by adjacency, so a late member cannot mix two prompts.

    Raises:
        ValueError: If ``count`` is not a multiple of ``group_size``.
    """
    if group_size < 1 or count % group_size:
        raise ValueError(f"{count} samples are not whole groups of {group_size}")
    members: dict[str, list[int]] = {}
    chosen: list[int] = []
    for candidate in candidates:
        group = members.setdefault(candidate.group_id, [])
        group.append(candidate.index)
        if len(group) == group_size:
            chosen += group
            if len(chosen) == count:
                return chosen
    return None


def balanced_order(costs: Sequence[int], *, num_ranks: int) -> list[int]:
    """An order in which equal consecutive parts have about equal cost.

    Largest differencing method of Karmarkar and Karp (1982) in its balanced form (Michiels et al.
    2003): blocks of ``num_ranks`` samples of similar cost are merged, heaviest part with lightest.

    Args:
        costs: Cost of each sample, for example its tokens.
        num_ranks: Number of parts; divides ``len(costs)``.

    Raises:
        ValueError: If the samples cannot be divided equally.
    """
    if num_ranks < 1 or len(costs) % num_ranks:
        raise ValueError(f"{len(costs)} samples cannot be divided among {num_ranks} ranks")
    by_cost = sorted(range(len(costs)), key=lambda index: -costs[index])
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, begin in enumerate(range(0, len(by_cost), num_ranks)):
        parts = [(costs[index], [index]) for index in by_cost[begin : begin + num_ranks]]
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapify(heap)
    tie_breaker = len(heap)
    while len(heap) > 1:
        _, _, heavy = heappop(heap)
        _, _, light = heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heappush(heap, (merged[-1][0] - merged[0][0], tie_breaker, merged))
        tie_breaker += 1
    return [index for _, part in heap[0][2] for index in part] if heap else []
