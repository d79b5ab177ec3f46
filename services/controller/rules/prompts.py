"""Order in which prompts are issued: a pure function of seed, prompt sets and position."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from services.controller.rules.difficulty import Difficulty

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_ROUNDS = 4
# Max rows that a dispatch examines to find one that is not skipped, which bounds its time.
_MAX_EXAMINED = 31


class Mixture:
    """Concatenation of prompt sets, with a weighted interleaving.

    Args:
        rows: Number of rows of each set, by split.
        weights: Weight of each set; defaults to its number of rows, so that an epoch has every row
            once.

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
        """Number of rows of each set."""
        set_weights = weights or {}
        self._weights = [float(set_weights.get(split, size)) for split, size in rows.items()]
        self._begins = list(accumulate(self.sizes, initial=0))

    @property
    def num_rows(self) -> int:
        """Number of rows of all sets, which is the length of an epoch."""
        return self._begins[-1]

    def set_of(self, row: int) -> int:
        """Returns the index of the set that contains a row."""
        return bisect_right(self._begins, row) - 1

    def place(self, row: int) -> tuple[str, int]:
        """Returns the split of a row, and its index in that set."""
        number = self.set_of(row)
        return self.splits[number], row - self._begins[number]

    def name(self, row: int) -> str:
        split, index = self.place(row)
        return f"row {index} of data.{split}"

    def row(self, number: int, index: int) -> int:
        return self._begins[number] + index

    def next_set(self, counts: Sequence[int]) -> int:
        """Returns the index of the set that provides the next row (divisor method).

        Args:
            counts: Number of rows taken from each set.
        """
        keys = [
            (2 * count + 1) / weight for count, weight in zip(counts, self._weights, strict=True)
        ]
        return keys.index(min(keys))

    def taken(self, position: int) -> list[int]:
        """Returns how many of the first ``position`` rows each set provides.

        The time that it takes does not depend on ``position``.
        """
        total, num_sets = sum(self._weights), len(self._weights)
        # Starts at lower bounds: the divisor method deviates from proportional shares at most this far.
        counts = [max(0, int(position * weight / total) - num_sets - 1) for weight in self._weights]
        for _ in range(position - sum(counts)):
            counts[self.next_set(counts)] += 1
        return counts


class ReturnedRow(NamedTuple):
    """Row that was returned in this epoch, or before and is not issued again yet."""

    row: int
    number: int
    """Order of the return, from 0."""
    epoch: int
    """Epoch in which it was returned."""
    is_waiting: bool
    """True until it is issued again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedRowsChange:
    """Changes of returned rows since the previous one: first the deletions, then the new and changed rows."""

    is_new_epoch: bool
    """True if an epoch began: all stored rows that do not wait are deleted."""
    deleted: tuple[int, ...]
    """Further rows to delete."""
    rows: tuple[ReturnedRow, ...]
    """New and changed rows."""


class ReturnedRows:
    """Rows that are issued once more at the end of their epoch, because their samples were dropped.

    Args:
        rows: Stored rows, in order of their return.
    """

    def __init__(self, rows: Iterable[ReturnedRow] = ()) -> None:
        self._rows = {row.row: row for row in rows}
        self._waiting = deque(row.row for row in self._rows.values() if row.is_waiting)
        self._epoch = max((row.epoch for row in self._rows.values()), default=0)
        self._num_returned = max((row.number for row in self._rows.values()), default=-1) + 1
        self._changed: dict[int, None] = {}
        self._deleted: list[int] = []
        self._is_new_epoch = False

    @property
    def has_waiting(self) -> bool:
        """True if a row waits to be issued again."""
        return bool(self._waiting)

    def add(self, row: int, *, epoch: int) -> bool:
        """Adds a row; returns False if it was returned in this epoch before."""
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        if row in self._rows:
            return False
        self._rows[row] = ReturnedRow(row, self._num_returned, epoch, is_waiting=True)
        self._num_returned += 1
        self._waiting.append(row)
        self._changed[row] = None
        return True

    def take(self) -> int:
        """Removes the first waiting row and returns it."""
        row = self._waiting.popleft()
        self._rows[row] = self._rows[row]._replace(is_waiting=False)
        self._changed[row] = None
        return row

    def take_changes(self) -> ReturnedRowsChange:
        """Returns the changes since the last call."""
        change = ReturnedRowsChange(
            is_new_epoch=self._is_new_epoch,
            deleted=tuple(self._deleted),
            rows=tuple(self._rows[row] for row in self._changed),
        )
        self._changed, self._deleted, self._is_new_epoch = {}, [], False
        return change

    def _begin_epoch(self, epoch: int) -> None:
        # Rows that were not issued at the end of their epoch wait for the end of this one.
        self._epoch, self._is_new_epoch = epoch, True
        self._deleted += [row for row in self._changed if not self._rows[row].is_waiting]
        self._rows = {row: state for row, state in self._rows.items() if state.is_waiting}
        self._changed = {row: None for row in self._changed if row in self._rows}


class PromptOrder:
    """Yields rows of the training data, epoch after epoch, without quarantined rows.

    Each set has its own epochs, in which each of its rows comes once. An epoch of the run has as
    many rows as all sets together.

    Args:
        position: Rows that were taken before.
        quarantined: Rows that are skipped.
        returned: Rows that were returned before.
        difficulty: Determines which rows are skipped; None if none are.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seed: int,
        shuffle: bool,
        position: int = 0,
        quarantined: Iterable[int] = (),
        returned_rows: ReturnedRows | None = None,
        difficulty: Difficulty | None = None,
    ) -> None:
        self.mixture = mixture
        """Prompt sets of the training data."""
        self.difficulty = difficulty
        """Success rates of the prompts; None without a curriculum."""
        self._num_rows = mixture.num_rows
        self._num_taken = mixture.taken(position)
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._quarantined = set(quarantined)
        self.returned = ReturnedRows() if returned_rows is None else returned_rows
        """Rows that are issued once more."""

    @property
    def position(self) -> int:
        """Rows taken so far, skipped ones included."""
        return self._position

    def next_row(self, *, step: int = 0) -> int | None:
        """Returns the next row; None if all rows are quarantined.

        If nearly all rows are skipped, a skipped row may be issued early.

        Args:
            step: Step whose weights are served.
        """
        if len(self._quarantined) == self._num_rows:
            return None
        # One less than the number of rows, so that searches among skipped rows end at different rows.
        left_to_examine = max(1, min(_MAX_EXAMINED, self._num_rows - 1))
        while True:
            is_epoch_over = self._position > 0 and self._position % self._num_rows == 0
            if is_epoch_over and self.returned.has_waiting:
                row = self.returned.take()
                if row not in self._quarantined:
                    return row
                continue
            row = self._take()
            if row in self._quarantined:
                continue
            left_to_examine -= 1
            if self.difficulty is None or left_to_examine <= 0:
                return row
            if not self.difficulty.is_skipped(row, step=step):
                return row

    def give_back(self, row: int) -> bool:
        """Schedules a row to be issued again at the end of its epoch.

        Returns:
            False if the row was scheduled in this epoch before; it is then not scheduled again.
        """
        epoch = max(self._position - 1, 0) // self._num_rows
        return self.returned.add(row, epoch=epoch)

    def quarantine(self, row: int) -> None:
        self._quarantined.add(row)

    def _take(self) -> int:
        """Returns the row at the current position and advances the position."""
        number = self.mixture.next_set(self._num_taken)
        num_rows = self.mixture.sizes[number]
        epoch, index = divmod(self._num_taken[number], num_rows)
        self._num_taken[number] += 1
        self._position += 1
        if self._shuffle:
            index = shuffled(index, num_rows, key=_mixed(self._seed, epoch, number))
        return self.mixture.row(number, index)


def shuffled(index: int, num_rows: int, *, key: int) -> int:
    """Returns where a pseudorandom permutation moves ``index``, in constant memory.

    The index is split into two digits; each is shifted by a hash of the other one, alternating: a Feistel
    network, which permutes all pairs. Results beyond the last row are permuted again (cycle walking).

    Args:
        index: Index of the row, from 0.
    """
    low_base = math.isqrt(num_rows - 1) + 1
    high_base = -(-num_rows // low_base)
    start = key * _FIRST & _MASK
    while True:
        high, low = divmod(index, low_base)
        for number in range(_ROUNDS):
            low = (low + _scattered(start + high * _SECOND + number)) % low_base
            high = (high + _scattered(start + low * _SECOND + ~number)) % high_base
        index = high * low_base + low
        if index < num_rows:
            return index


def sample_seed(run_seed: int, group_sequence: int, member: int, *, failures: int = 0) -> int:
    """Returns the seed of one sample, which differs between all samples of a run.

    An attempt after an interruption or a loss samples the same tokens. An attempt after a failure
    samples other tokens, because the same ones would fail again.

    Args:
        failures: Failed attempts of the group.
    """
    seed = _mixed(run_seed, group_sequence, member)
    if failures:
        seed = _mixed(seed, failures, 0)
    return seed & ((1 << 62) - 1)


def _mixed(first: int, second: int, third: int) -> int:
    """Hashes three integers to 64 bits."""
    return _scattered(first * _FIRST + second * _SECOND + third)


def _scattered(number: int) -> int:
    """Hashes an integer to 64 bits."""
    bits = number & _MASK
    bits ^= bits >> 31
    bits = bits * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 29)
