"""The order in which prompts are issued: a pure function of seed, epoch and number of rows."""

import random
from collections.abc import Iterable


class PromptOrder:
    """Rows of the training data, epoch after epoch; quarantined rows are skipped.

    Args:
        num_rows: Rows of the training data.
        seed: Of the run.
        shuffle: Whether each epoch has an order of its own.
        position: Rows that were taken before.
        quarantined: Rows that are skipped.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        shuffle: bool,
        position: int = 0,
        quarantined: Iterable[int] = (),
    ) -> None:
        if num_rows < 1:
            raise ValueError(
                "the training data has no rows; name a source with at least one prompt"
            )
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        self._quarantined = set(quarantined)

    @property
    def position(self) -> int:
        """Rows taken so far, skipped ones included."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._position // self._num_rows

    def next_row(self) -> int | None:
        """The next row, or None if all rows are quarantined."""
        if len(self._quarantined) == self._num_rows:
            return None
        while True:
            row = self._row_at(self._position)
            self._position += 1
            if row not in self._quarantined:
                return row

    def quarantine(self, row: int) -> None:
        """Never issue a row again."""
        self._quarantined.add(row)

    def _row_at(self, position: int) -> int:
        epoch, index = divmod(position, self._num_rows)
        if not self._shuffle:
            return index
        if self._epoch_order[0] != epoch:
            order = list(range(self._num_rows))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311  an order, not a secret
            self._epoch_order = (epoch, order)
        return self._epoch_order[1][index]


def sample_seed(run_seed: int, group_sequence: int, member: int) -> int:
    """Seed of one sample: the same for every try, different between all samples of a run."""
    mixed = (run_seed * 0x9E3779B97F4A7C15 + group_sequence * 0xBF58476D1CE4E5B9 + member) & (
        (1 << 64) - 1
    )
    mixed ^= mixed >> 31
    mixed = (mixed * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (mixed ^ (mixed >> 29)) & ((1 << 62) - 1)
