"""The order in which prompts are issued: a pure function of seed, sets of prompts and position."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from services.controller.rules.difficulty import Difficulty


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


_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_ROUNDS = 4
# Rows that are set aside and passed over for one that is not: a hand-out must not take long.
_MOST_LOOKS = 31


@dataclass(frozen=True, slots=True)
class ReturnedRows:
    """Rows that come once more at the end of their epoch, because their samples were thrown away."""

    epoch: int = 0
    waiting: tuple[int, ...] = ()
    """Not issued again yet."""
    known: tuple[int, ...] = ()
    """All that were returned in this epoch; none is returned twice."""


class PromptOrder:
    """Rows of the training data, epoch after epoch; quarantined rows are skipped.

    Each set has epochs of its own, in which every row of it comes once. An epoch of the run has as many rows
    as all sets together.

    Args:
        mixture: The training data.
        seed: Of the run.
        shuffle: Whether each epoch has an order of its own.
        position: Rows that were taken before.
        quarantined: Rows that are skipped.
        returned: Rows that were given back before.
        difficulty: Tells which rows are set aside for a while; None if all are issued.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seed: int,
        shuffle: bool,
        position: int = 0,
        quarantined: Iterable[int] = (),
        returned: ReturnedRows | None = None,
        difficulty: Difficulty | None = None,
    ) -> None:
        self.mixture = mixture
        """The sets that rows are of."""
        self.difficulty = difficulty
        """Which rows are worth a try."""
        self._num_rows = mixture.num_rows
        self._taken = mixture.taken(position)
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._quarantined = set(quarantined)
        self.returned = returned or ReturnedRows()
        """Rows that were given back."""

    @property
    def position(self) -> int:
        """Rows taken so far, skipped ones included."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._position // self._num_rows

    def next_row(self, *, step: int = 0) -> int | None:
        """The next row, or None if all rows are quarantined.

        Where nearly all are set aside, one of them is issued before its time.

        Args:
            step: Step whose weights are served.
        """
        if len(self._quarantined) == self._num_rows:
            return None
        # One less than all rows: another one ends the search each time.
        looks = max(1, min(_MOST_LOOKS, self._num_rows - 1))
        while True:
            is_epoch_over = self._position > 0 and self._position % self._num_rows == 0
            if is_epoch_over and self.returned.waiting:
                row, *rest = self.returned.waiting
                self.returned = replace(self.returned, waiting=tuple(rest))
                if row not in self._quarantined:
                    return row
                continue
            row = self._take()
            if row in self._quarantined:
                continue
            looks -= 1
            if self.difficulty is None or looks <= 0:
                return row
            if not self.difficulty.is_aside(row, step=step):
                return row

    def give_back(self, row: int) -> bool:
        """Issue a row once more at the end of the epoch; False if that was done in this epoch before."""
        epoch = max(self._position - 1, 0) // self._num_rows
        if epoch != self.returned.epoch:
            # Rows that an epoch's end left behind are not lost: they wait for the next one.
            self.returned = ReturnedRows(epoch, self.returned.waiting, self.returned.waiting)
        if row in self.returned.known:
            return False
        waiting, known = self.returned.waiting, self.returned.known
        self.returned = ReturnedRows(epoch, (*waiting, row), (*known, row))
        return True

    def quarantine(self, row: int) -> None:
        """Never issue a row again."""
        self._quarantined.add(row)

    def _take(self) -> int:
        """The row of the next place."""
        number = self.mixture.next_set(self._taken)
        num_rows = self.mixture.sizes[number]
        epoch, index = divmod(self._taken[number], num_rows)
        self._taken[number] += 1
        self._position += 1
        if self._shuffle:
            index = shuffled(index, num_rows, key=_mixed(self._seed, epoch, number))
        return self.mixture.row(number, index)


def shuffled(index: int, num_rows: int, *, key: int) -> int:
    """Where a permutation of ``num_rows`` rows puts one of them, without making the others.

    The index becomes a pair of digits, each of which is moved by a hash of the other in turn: a Feistel
    network, which is a permutation of all pairs. What falls behind the last row is permuted again.

    Args:
        index: The row's place, from 0.
        num_rows: Rows that there are.
        key: Chooses the permutation.
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
    """Seed of one sample, different between all samples of a run.

    An attempt after an interruption or a loss draws the same tokens. One after a failure draws others: the
    same ones would fail again.

    Args:
        run_seed: Seed of the run.
        group_sequence: Order of admission of the group.
        member: Place of the sample in the group.
        failures: Attempts of the group that failed.
    """
    seed = _mixed(run_seed, group_sequence, member)
    if failures:
        seed = _mixed(seed, failures, 0)
    return seed & ((1 << 62) - 1)


def _mixed(first: int, second: int, third: int) -> int:
    """Numbers as one of 64 bits that looks random."""
    return _scattered(first * _FIRST + second * _SECOND + third)


def _scattered(number: int) -> int:
    """A number as one of 64 bits that looks random."""
    mixed = number & _MASK
    mixed ^= mixed >> 31
    mixed = mixed * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 29)
