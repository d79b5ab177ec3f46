"""What puts bring to a partition, and the rules that they keep."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import add
from sys import intern
from typing import ClassVar, TypeVar, cast

from services.common.batch import KVBatchMeta
from services.common.columns import BlobRef, FieldColumn, TagValues
from services.common.errors import AlreadyExistsError, InvalidArgumentError
from services.transferqueue.transport.codec import ITEM_BYTES

Kind = tuple[str, int, tuple[int, ...]]
"""Type of a field: dtype, row rank, tail shape."""
Ints = Sequence[int]
Values = Ints | Sequence[float] | Sequence[str]
_SHORT_COLUMN = 32
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Part:
    """What one put brought for its keys. Its blobs go when the last of these rows goes.

    Each sample may have one of its own, so names and short columns that puts have in common exist once.
    """

    fields: tuple[str, ...]
    lengths: tuple[Ints, ...]
    """Lengths of the rows, by field."""
    offsets: tuple[Ints, ...]
    """Offsets of the rows, by field; all values of a field lie in one blob."""
    shard_ids: tuple[str, ...]
    """Where the blobs are, by field."""
    blob_numbers: "array[int]"
    """Id, size and checksum of each field's blob."""
    tags: tuple[str, ...]
    tag_values: tuple[Values, ...]
    num_rows: int
    """Rows that exist."""
    num_unsettled: int = 0
    """Rows that exist and were not acknowledged by all consumers."""

    @classmethod
    def of(cls, meta: KVBatchMeta) -> "Part":
        """What a put brings whose fields lie in one blob each."""
        # Many columns of a put are equal, such as the lengths of all that is counted in tokens.
        kept: dict[tuple[str, TagValues], Values] = {}

        def keep(values: TagValues) -> Values:
            kind = type(values[0]).__name__
            found = kept.get((kind, values))
            if found is None:
                is_short = len(values) <= _SHORT_COLUMN
                found = _shared(kind, values) if is_short else _compact(values)
                kept[kind, values] = found
            return found

        blobs = [meta.blobs[column.blob_indexes[0]] for column in meta.fields]
        numbers = [n for blob in blobs for n in (blob.blob_id, blob.size_bytes, blob.checksum)]
        return cls(
            fields=_once(meta.field_names),
            lengths=tuple([cast("Ints", keep(column.lengths)) for column in meta.fields]),
            offsets=tuple([cast("Ints", keep(column.offsets)) for column in meta.fields]),
            shard_ids=_once(tuple([blob.shard_id for blob in blobs])),
            blob_numbers=array("Q", numbers),
            tags=_once(tuple(meta.tags)),
            tag_values=tuple(map(keep, meta.tags.values())),
            num_rows=meta.num_keys,
        )

    def blobs(self) -> list[BlobRef]:
        """Blobs of the fields."""
        return [
            BlobRef(shard_id=shard_id, blob_id=blob_id, size_bytes=size, checksum=checksum)
            for shard_id, blob_id, size, checksum in zip(
                self.shard_ids,
                self.blob_numbers[::3],
                self.blob_numbers[1::3],
                self.blob_numbers[2::3],
                strict=True,
            )
        ]

    def tag(self, name: str) -> Values | None:
        """Values of a tag, if the put brought it."""
        return self.tag_values[self.tags.index(name)] if name in self.tags else None

    def drop(self, name: str) -> BlobRef:
        """Forget a field; returns its blob."""
        number = self.fields.index(name)
        blob = self.blobs()[number]
        self.fields = _without(self.fields, number)
        self.lengths = _without(self.lengths, number)
        self.offsets = _without(self.offsets, number)
        self.shard_ids = _without(self.shard_ids, number)
        del self.blob_numbers[3 * number : 3 * number + 3]
        return blob


def _without(values: tuple[T, ...], number: int) -> tuple[T, ...]:
    return values[:number] + values[number + 1 :]


@lru_cache(maxsize=256)
def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


@lru_cache(maxsize=1024)
def _shared(kind: str, values: TagValues) -> Values:
    """A short column; ``kind`` keeps equal numbers of different types apart."""
    return _compact(values)


def _compact(values: TagValues) -> Values:
    if isinstance(values[0], str):
        return tuple(map(intern, cast("Sequence[str]", values)))
    if isinstance(values[0], float):
        return array("d", values)
    try:
        return array("i", cast("Sequence[int]", values))
    except OverflowError:
        return array("q", cast("Sequence[int]", values))


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
