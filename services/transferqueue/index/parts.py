"""What puts bring to a partition, and the rules that they keep."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import add
from typing import ClassVar

from services.common.batch import KVBatchMeta
from services.common.columns import BlobRef, FieldColumn
from services.common.errors import AlreadyExistsError, InvalidArgumentError
from services.transferqueue.transport.codec import ITEM_BYTES

Kind = tuple[str, int, tuple[int, ...]]
"""Type of a field: dtype, row rank, tail shape."""


@dataclass(slots=True)
class Column:
    """One field of one put; all its values lie in one blob."""

    blob: BlobRef
    lengths: "array[int]"
    offsets: "array[int]"


@dataclass(slots=True, eq=False)
class Part:
    """What one put brought for its keys. Its blobs go when the last of these rows goes."""

    columns: dict[str, Column]
    tags: dict[str, Sequence[int] | Sequence[float] | Sequence[str]]
    num_rows: int
    """Rows that exist."""
    num_unsettled: int = 0
    """Rows that exist and were not acknowledged by all consumers."""

    def blobs(self) -> list[BlobRef]:
        """Blobs of the columns."""
        return [column.blob for column in self.columns.values()]


@lru_cache(maxsize=4096)
def first_place(place: int) -> tuple[int, ...]:
    """The places of a row in one put; kept once, as most rows have one of a few."""
    return (place,)


class Row:
    """One sample: the puts that describe it, and its place in each."""

    __slots__ = ("is_settled", "key", "parts", "places", "revision")

    DELETED: ClassVar = -1

    def __init__(self, key: str, parts: tuple[Part, ...], places: tuple[int, ...]) -> None:
        self.key = key
        self.parts = parts
        self.places = places
        self.is_settled = False
        """Whether all consumers acknowledged it."""
        self.revision = 0
        """Newest change once complete; 0 before; ``DELETED`` after."""

    def field_names(self) -> frozenset[str]:
        """Fields that are there."""
        return frozenset(name for part in self.parts for name in part.columns)

    def tag(self, name: str) -> int | float | str | None:
        """Value of a tag; the newest put that brought it counts."""
        for part, place in zip(reversed(self.parts), reversed(self.places), strict=True):
            if name in part.tags:
                return part.tags[name][place]
        return None


@dataclass(frozen=True, slots=True)
class Extension:
    """Rows that a put extended; they had the same fields before."""

    rows: list[Row]
    before: frozenset[str]
    after: frozenset[str]


@dataclass(slots=True)
class Schema:
    """Types that the first puts of a partition set and later ones keep."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    tag_types: dict[str, type] = field(default_factory=dict)

    def check(self, meta: KVBatchMeta, known: Sequence[Row]) -> None:
        """Check a put before anything of it is stored; ``known`` are its rows that exist.

        Raises:
            AlreadyExistsError: If a key has one of the fields.
            InvalidArgumentError: If the put breaks a rule.
        """
        if not meta.keys or len(set(meta.keys)) != len(meta.keys):
            raise InvalidArgumentError("a put needs at least one key, and each key once")
        for column in meta.fields:
            self._check_column(column, meta.blobs)
        names = set(meta.field_names)
        if len(names) != len(meta.fields) or len(meta.blobs) != len(meta.fields):
            raise InvalidArgumentError("a put needs each field once, and one blob for each")
        for row in known:
            again = names & row.field_names()
            if again:
                raise AlreadyExistsError(
                    f"{row.key} has {', '.join(sorted(again))}; stored values never change, so "
                    "release the key before it is put again",
                    key=row.key,
                    fields=",".join(sorted(again)),
                )
        self._check_tags(meta, has_new_keys=len(known) < len(meta.keys))

    def learn(self, meta: KVBatchMeta) -> None:
        """Take over the types of a checked put."""
        for column in meta.fields:
            self.kinds[column.name] = _kind(column)
        for name, values in meta.tags.items():
            self.tag_types.setdefault(name, type(values[0]))

    def _check_column(self, column: FieldColumn, blobs: Sequence[BlobRef]) -> None:
        kind = _kind(column)
        expected = self.kinds.get(column.name, kind)
        if kind != expected:
            raise InvalidArgumentError(
                f"field {column.name!r} is {_text(kind)}, but this partition holds it as "
                f"{_text(expected)}; convert it before the put",
                field=column.name,
            )
        if column.dtype not in ITEM_BYTES:
            raise InvalidArgumentError(
                f"field {column.name!r} has dtype {column.dtype!r}; known are "
                f"{', '.join(ITEM_BYTES)}",
                field=column.name,
            )
        blob_index = column.blob_indexes[0]
        if blob_index < 0 or column.blob_indexes.count(blob_index) < len(column.blob_indexes):
            raise InvalidArgumentError(f"field {column.name!r} must lie in one blob")
        size = blobs[blob_index].size_bytes
        row_bytes = ITEM_BYTES[column.dtype] * prod(column.tail_shape)
        end = max(map(add, column.offsets, [row_bytes * length for length in column.lengths]))
        if end > size:
            raise InvalidArgumentError(
                f"field {column.name!r} ends at byte {end} of a blob of {size}",
                field=column.name,
            )

    def _check_tags(self, meta: KVBatchMeta, *, has_new_keys: bool) -> None:
        unknown = set(meta.tags) - set(self.tag_types) if self.tag_types else set()
        absent = set(self.tag_types) - set(meta.tags) if has_new_keys else set()
        if unknown or absent:
            raise InvalidArgumentError(
                f"the samples of a partition have the same tags, {sorted(self.tag_types)}; "
                f"this put has {sorted(meta.tags)}"
            )
        for name, values in meta.tags.items():
            known = self.tag_types.get(name, type(values[0]))
            if known is not type(values[0]):
                raise InvalidArgumentError(
                    f"tag {name!r} is {type(values[0]).__name__} here and {known.__name__} in "
                    "earlier puts",
                    tag=name,
                )


def _kind(column: FieldColumn) -> Kind:
    return column.dtype, column.row_rank, column.tail_shape


def _text(kind: Kind) -> str:
    dtype, row_rank, tail_shape = kind
    return f"{dtype} of rank {row_rank} with tail shape {list(tail_shape)}"
