"""What puts brought: columns over the samples, and the blobs that hold their values."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias, cast

from services.common.batch import BlobRef, KVBatchMeta, TagValues

Layout = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Fields, the shards of their blobs, tags."""
Values: TypeAlias = "array[int] | array[float] | list[str]"
_FULL_ROWS = 256


class ColumnRange:
    """What some puts brought, with one entry per row in each column.

    Puts that bring the same fields and tags share a part until it is full: an object for each would take
    more memory than what it says. The blobs of a put go when the last of its rows goes.

    Args:
        layout: What all its puts bring.
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
        """Offsets of the rows, by field; all values that a put brings for a field lie in one blob."""
        self.tag_values: list[Values] = []
        self.puts = array("h")
        """Number of the put that brought each row."""
        self._blob_ids = array("Q")
        self._sizes = array("i")
        self._checksums = array("Q")
        self._num_rows = array("i")

    @property
    def is_full(self) -> bool:
        """Whether no further put belongs here."""
        return len(self.puts) >= _FULL_ROWS

    def append(self, meta: KVBatchMeta) -> int:
        """Add a put of this layout; returns the place of its first row."""
        first, put = len(self.puts), len(self._num_rows)
        for number, column in enumerate(meta.fields):
            self.lengths[number] = _grown(self.lengths[number], column.lengths)
            self.offsets[number] = _grown(self.offsets[number], column.offsets)
            blob = meta.blobs[column.blob_indexes[0]]
            self._blob_ids.append(blob.blob_id)
            self._sizes = _grown(self._sizes, (blob.size_bytes,))
            self._checksums.append(blob.checksum)
        columns = self.tag_values or [_column_of(values) for values in meta.tags.values()]
        self.tag_values = [
            _with(column, values)
            for column, values in zip(columns, meta.tags.values(), strict=True)
        ]
        self.puts.extend(array("h", (put,)) * meta.num_keys)
        self._num_rows.append(meta.num_keys)
        return first

    def blob(self, put: int, number: int) -> BlobRef:
        """Blob of a put's field, by the number of the field."""
        at = put * len(self.fields) + number
        return BlobRef(
            shard_id=self.shard_ids[number],
            blob_id=self._blob_ids[at],
            size_bytes=self._sizes[at],
            checksum=self._checksums[at],
        )

    def tag(self, name: str) -> "Values | None":
        """Values of a tag, if the puts brought it."""
        return self.tag_values[self.tags.index(name)] if name in self.tags else None

    def remove(self, places: Iterable[int]) -> list[BlobRef]:
        """Forget rows; returns the blobs that no row needs any more."""
        unused: list[BlobRef] = []
        for put, count in Counter(map(self.puts.__getitem__, places)).items():
            self._num_rows[put] -= count
            if self._num_rows[put] == 0:
                unused += [self.blob(put, number) for number in range(len(self.fields))]
        return unused


def layout_of(meta: KVBatchMeta) -> Layout:
    """What a put brings."""
    blobs = [meta.blobs[column.blob_indexes[0]] for column in meta.fields]
    return meta.field_names, tuple([blob.shard_id for blob in blobs]), tuple(meta.tags)


def _column_of(values: TagValues) -> Values:
    if isinstance(values[0], str):
        return []
    return array("d") if isinstance(values[0], float) else array("b")


def _with(column: Values, values: TagValues) -> Values:
    """A column with further values; the schema sees to it that all have one type."""
    if isinstance(column, list):
        column += map(_once, cast("Sequence[str]", values))
    elif column.typecode == "d":
        cast("array[float]", column).extend(array("d", cast("Sequence[float]", values)))
    else:
        return _grown(cast("array[int]", column), cast("Sequence[int]", values))
    return column


def _grown(column: "array[int]", values: Sequence[int]) -> "array[int]":
    """A column with further values, as wide as they need."""
    while True:
        try:
            column.extend(array(column.typecode, values))
        except OverflowError:
            column = array("bhiq"["bhiq".index(column.typecode) + 1], column)
        else:
            return column


@lru_cache(maxsize=256)
def _once(text: str) -> str:
    """The same object for equal texts, as many tags have one of a few, and those of a group are equal."""
    return text


@lru_cache(maxsize=4096)
def first_place(place: int) -> tuple[int, ...]:
    """The places of a row in one put; kept once, as most rows have one of a few."""
    return (place,)


class Row:
    """One sample: the parts that describe it, and its place in each."""

    __slots__ = ("key", "parts", "places", "revision")

    DELETED: ClassVar = -1

    def __init__(self, key: str, parts: tuple[ColumnRange, ...], places: tuple[int, ...]) -> None:
        self.key = key
        self.parts = parts
        self.places = places
        self.revision = 0
        """Newest change once complete; 0 before; ``DELETED`` after."""

    def field_names(self) -> frozenset[str]:
        """Fields that are there."""
        return frozenset(name for part in self.parts for name in part.fields)

    def tag(self, name: str) -> int | float | str | None:
        """Value of a tag; the newest put that brought it counts."""
        for part, place in zip(reversed(self.parts), reversed(self.places), strict=True):
            if (values := part.tag(name)) is not None:
                return values[place]
        return None


@dataclass(frozen=True, slots=True)
class Extension:
    """Rows that a put extended; they had the same fields before."""

    rows: list[Row]
    before: frozenset[str]
    after: frozenset[str]
