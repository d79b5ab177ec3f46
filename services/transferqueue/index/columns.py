"""Column storage of sample metadata: one entry per row for the fields and tags of puts."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias, cast

from services.wire.batch import BlobRef, KVBatchMeta, TagValues

Layout = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Field names, shard ids of the fields' blobs, tag names."""
Values: TypeAlias = "array[int] | array[float] | list[str]"
_FULL_ROWS = 256


class ColumnRange:
    """Metadata of several puts, with one entry per row in each column.

    Puts with the same fields and tags share a range until it is full: an object per put would take
    more memory than its content. The blobs of a put are released with its last row.

    Args:
        layout: Fields, shards and tags that all its puts have.
    """

    __slots__ = (
        "_blob_ids", "_checksums", "_num_rows", "_sizes", "fields", "lengths", "offsets",
        "puts", "shard_ids", "tag_values", "tags",
    )  # fmt: skip

    def __init__(self, layout: Layout) -> None:
        self.fields, self.shard_ids, self.tags = layout
        self.lengths = [array("b") for _ in self.fields]
        """Lengths of the rows, by field."""
        self.offsets = [array("b") for _ in self.fields]
        """Byte offsets of the rows, by field; all values of a field in one put lie in one blob."""
        self.tag_values: list[Values] = []
        self.puts = array("h")
        """Number of the put that added each row."""
        self._blob_ids = array("Q")
        self._sizes = array("i")
        self._checksums = array("Q")
        self._num_rows = array("i")

    @property
    def is_full(self) -> bool:
        """True if the range accepts no further put."""
        return len(self.puts) >= _FULL_ROWS

    def append(self, meta: KVBatchMeta) -> int:
        """Adds a put of this layout; returns the index of its first row."""
        first, put = len(self.puts), len(self._num_rows)
        for number, column in enumerate(meta.fields):
            self.lengths[number] = _extended(self.lengths[number], column.lengths)
            self.offsets[number] = _extended(self.offsets[number], column.offsets)
            blob = meta.blobs[column.blob_indexes[0]]
            self._blob_ids.append(blob.blob_id)
            self._sizes = _extended(self._sizes, (blob.size_bytes,))
            self._checksums.append(blob.checksum)
        columns = self.tag_values or [_column_of(values) for values in meta.tags.values()]
        self.tag_values = [
            _append_values(column, values)
            for column, values in zip(columns, meta.tags.values(), strict=True)
        ]
        self.puts.extend(array("h", (put,)) * meta.num_keys)
        self._num_rows.append(meta.num_keys)
        return first

    def blob(self, put: int, number: int) -> BlobRef:
        """Returns the blob of a put's field; ``number`` is the index of the field."""
        at = put * len(self.fields) + number
        return BlobRef(
            shard_id=self.shard_ids[number],
            blob_id=self._blob_ids[at],
            size_bytes=self._sizes[at],
            checksum=self._checksums[at],
        )

    def tag(self, name: str) -> "Values | None":
        """Returns the values of a tag; None if the puts do not have it."""
        return self.tag_values[self.tags.index(name)] if name in self.tags else None

    def remove(self, indexes: Iterable[int]) -> list[BlobRef]:
        """Removes rows by index; returns the blobs that no row uses any more."""
        unused: list[BlobRef] = []
        for put, count in Counter(map(self.puts.__getitem__, indexes)).items():
            self._num_rows[put] -= count
            if self._num_rows[put] == 0:
                unused += [self.blob(put, number) for number in range(len(self.fields))]
        return unused


def layout_of(meta: KVBatchMeta) -> Layout:
    blobs = [meta.blobs[column.blob_indexes[0]] for column in meta.fields]
    return meta.field_names, tuple([blob.shard_id for blob in blobs]), tuple(meta.tags)


def _column_of(values: TagValues) -> Values:
    if isinstance(values[0], str):
        return []
    return array("d") if isinstance(values[0], float) else array("b")


def _append_values(column: Values, values: TagValues) -> Values:
    """Appends values to a column; the schema guarantees that all have one type."""
    if isinstance(column, list):
        column += map(_interned, cast("Sequence[str]", values))
    elif column.typecode == "d":
        cast("array[float]", column).extend(array("d", cast("Sequence[float]", values)))
    else:
        return _extended(cast("array[int]", column), cast("Sequence[int]", values))
    return column


def _extended(column: "array[int]", values: Sequence[int]) -> "array[int]":
    """Appends values to a column; widens its item type if they do not fit."""
    while True:
        try:
            column.extend(array(column.typecode, values))
        except OverflowError:
            column = array("bhiq"["bhiq".index(column.typecode) + 1], column)
        else:
            return column


@lru_cache(maxsize=256)
def _interned(text: str) -> str:
    """Interns equal texts: many tags have few distinct values, and samples of a group have equal ones."""
    return text


@lru_cache(maxsize=4096)
def single_put(index: int) -> tuple[int, ...]:
    """Returns the ``places`` of a row with one put; cached, because most rows share a few tuples."""
    return (index,)


class Row:
    """One sample: the column ranges that describe it, and its index in each."""

    __slots__ = ("key", "parts", "places", "revision")

    DELETED: ClassVar = -1

    def __init__(self, key: str, ranges: tuple[ColumnRange, ...], indexes: tuple[int, ...]) -> None:
        self.key = key
        self.parts = ranges
        self.places = indexes
        self.revision = 0
        """Revision of the newest change since the row became complete; 0 before, ``DELETED`` after deletion.
        """

    def field_names(self) -> frozenset[str]:
        return frozenset(name for columns in self.parts for name in columns.fields)

    def tag(self, name: str) -> int | float | str | None:
        """Returns the value of a tag from the newest put that has it."""
        for columns, index in zip(reversed(self.parts), reversed(self.places), strict=True):
            if (values := columns.tag(name)) is not None:
                return values[index]
        return None


@dataclass(frozen=True, slots=True)
class Extension:
    """Rows to which a put added fields; all had the same fields before."""

    rows: list[Row]
    before: frozenset[str]
    after: frozenset[str]
