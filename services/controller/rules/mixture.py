"""Several sets of prompts as one: which set each place of the order is of, by weight alone. Pure.

The places of a set of weight w are spread evenly: its k-th place, from 0, has the key ``(2k + 1) / w``, and
places stand in the order of their keys (the divisor method of Sainte-Lague). So every batch has each set's
share, as near as whole prompts allow, and where a run is in each set follows from its position alone.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate


class Mixture:
    """Sets of prompts whose rows are numbered one set after the other.

    Args:
        rows: Rows of each set, by split.
        weights: Weight of each set; the number of its rows where there is none, for which an epoch has every
            row once.

    Raises:
        ValueError: If a set has no rows.
    """

    def __init__(self, rows: Mapping[str, int], weights: Mapping[str, float] | None = None) -> None:
        if not rows or min(rows.values()) < 1:
            empty = [f"data.{split}" for split, count in rows.items() if count < 1]
            raise ValueError(
                f"{', '.join(empty) or 'data.train'} has no rows; name a source with at least one prompt"
            )
        self.splits = tuple(rows)
        """Names of the sets."""
        self.sizes: Sequence[int] = tuple(rows.values())
        """Rows of each."""
        given = weights or {}
        self._weights = [float(given.get(split, size)) for split, size in rows.items()]
        self._begins = list(accumulate(self.sizes, initial=0))

    @property
    def num_rows(self) -> int:
        """Rows of all sets, which make an epoch."""
        return self._begins[-1]

    def set_of(self, row: int) -> int:
        """Number of the set that a row is of."""
        return bisect_right(self._begins, row) - 1

    def place(self, row: int) -> tuple[str, int]:
        """The split of a row, and its number there."""
        number = self.set_of(row)
        return self.splits[number], row - self._begins[number]

    def name(self, row: int) -> str:
        """A row, for people."""
        split, index = self.place(row)
        return f"row {index} of data.{split}"

    def row(self, number: int, index: int) -> int:
        """The row that is row ``index`` of a set."""
        return self._begins[number] + index

    def next_set(self, taken: Sequence[int]) -> int:
        """Number of the set that the next place is of.

        Args:
            taken: Places of each set so far.
        """
        keys = [
            (2 * count + 1) / weight for count, weight in zip(taken, self._weights, strict=True)
        ]
        return keys.index(min(keys))

    def taken(self, position: int) -> list[int]:
        """Places of each set among the first ``position``, in time that does not grow with it."""
        total, num_sets = sum(self._weights), len(self._weights)
        # None has fewer: shares of the divisor method are as near as that.
        taken = [max(0, int(position * weight / total) - num_sets - 1) for weight in self._weights]
        for _ in range(position - sum(taken)):
            taken[self.next_set(taken)] += 1
        return taken
