"""Choice of ready samples for a consumer: pure functions over their group ids in order of arrival."""

from collections.abc import Iterable
from itertools import islice


def fifo(groups: Iterable[str], count: int) -> list[int] | None:
    """Returns the places of the ``count`` oldest samples; None if there are fewer."""
    num_ready = sum(1 for _ in islice(groups, count))
    return list(range(count)) if num_ready == count else None


def whole_groups(groups: Iterable[str], count: int, *, group_size: int) -> list[int] | None:
    """Returns the places of the ``count`` samples whose groups were complete first; None if there are fewer.

    Members are found by group id, never by adjacency, so a late member cannot mix two prompts.

    Raises:
        ValueError: If ``count`` is not a multiple of ``group_size``.
    """
    if group_size < 1 or count % group_size:
        raise ValueError(f"{count} samples are not whole groups of {group_size}")
    members: dict[str, list[int]] = {}
    chosen: list[int] = []
    for place, group_id in enumerate(groups):
        group = members.setdefault(group_id, [])
        group.append(place)
        if len(group) == group_size:
            chosen += group
            if len(chosen) == count:
                return chosen
    return None
