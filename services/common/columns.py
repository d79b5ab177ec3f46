"""Columns of a ``KVBatchMeta``: where the values of the fields lie."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar, cast

TagValues = tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
_Values = TypeVar("_Values", bound=tuple[object, ...])
MISSING = -1
"""Blob index of a key that does not have the field yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """An immutable run of bytes on a shard: one field's values of one put."""

    shard_id: str
    """The storage shard."""
    blob_id: int
    """Number of the blob on its shard, never used again for other bytes."""
    size_bytes: int
    """Size of the blob."""
    checksum: int
    """64-bit XXH3 of the blob's only part, or of the checksums of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldColumn:
    """Where the values of one field lie, with one entry per key in each tuple."""

    name: str
    """Field, as in the data dictionary."""
    dtype: str
    """Element type, for example ``float32``."""
    row_rank: int
    """Number of dimensions of one sample; 0 for scalars."""
    tail_shape: tuple[int, ...]
    """Dimensions behind the first one, equal for all samples."""
    lengths: tuple[int, ...]
    """Length of each sample's first dimension; 1 for scalars."""
    blob_indexes: tuple[int, ...]
    """Index into the meta's blobs; ``MISSING`` where the key lacks the field."""
    offsets: tuple[int, ...]
    """Byte offset inside the blob."""

    def select(self, indexes: Sequence[int]) -> "FieldColumn":
        """The entries of some keys, in the given order."""
        return replace(
            self,
            lengths=pick(self.lengths, indexes),
            blob_indexes=pick(self.blob_indexes, indexes),
            offsets=pick(self.offsets, indexes),
        )

    def renumber(self, numbers: Mapping[int, int]) -> "FieldColumn":
        """The same entries with other blob indexes; ``numbers`` knows that of ``MISSING`` too."""
        return replace(self, blob_indexes=tuple(map(numbers.__getitem__, self.blob_indexes)))

    def without_values(self, num_keys: int) -> "FieldColumn":
        """A column of this type for keys that lack the field."""
        zeros = (0,) * num_keys
        return replace(self, lengths=zeros, blob_indexes=(MISSING,) * num_keys, offsets=zeros)


def as_tag(values: Iterable[int | float | str]) -> TagValues:
    """The values of one tag, which are all of one type."""
    return tuple(values)  # type: ignore[return-value]


def pick(values: _Values, indexes: Sequence[int]) -> _Values:
    """Some of the values, in the given order."""
    if isinstance(indexes, range) and indexes.step == 1:
        return cast("_Values", values[indexes.start : indexes.stop])
    picked: Any = tuple(values[index] for index in indexes[:1])
    if len(indexes) > 1:
        # Several times as fast as a loop, and a controller picks millions a second.
        picked = itemgetter(*indexes)(values)
    return cast("_Values", picked)


def concat_columns(columns: Sequence[FieldColumn]) -> FieldColumn:
    """One column with the entries of several, whose blob indexes mean the same blobs already.

    Raises:
        ValueError: If their types differ.
    """
    first = columns[0]
    kinds = {(column.dtype, column.row_rank, column.tail_shape) for column in columns}
    if len(kinds) != 1:
        raise ValueError(f"field {first.name!r} has different types: {sorted(kinds)}")
    return replace(
        first,
        lengths=tuple(chain.from_iterable(column.lengths for column in columns)),
        blob_indexes=tuple(chain.from_iterable(column.blob_indexes for column in columns)),
        offsets=tuple(chain.from_iterable(column.offsets for column in columns)),
    )


def check_column(column: FieldColumn, num_keys: int, num_blobs: int) -> None:
    """Check a column that came from outside.

    Raises:
        ValueError: If it does not have one entry per key, or points outside the blobs.
    """
    for values in (column.lengths, column.blob_indexes, column.offsets):
        if len(values) != num_keys:
            raise ValueError(f"field {column.name!r} has {len(values)} entries, not {num_keys}")
    if num_keys == 0:
        return
    if not MISSING <= min(column.blob_indexes) <= max(column.blob_indexes) < num_blobs:
        raise ValueError(f"field {column.name!r} points outside the {num_blobs} blobs")
    if min(column.lengths) < 0 or min(column.offsets) < 0 or min(column.tail_shape, default=0) < 0:
        raise ValueError(f"field {column.name!r} has a negative length, offset or dimension")
