"""Schema of a partition: types of fields and tags, and the rules that each put must follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add

from services.common.errors import AlreadyExistsError, InvalidArgumentError
from services.transferqueue.index.columns import Row
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding.codec import ITEM_BYTES

Kind = tuple[str, int, tuple[int, ...]]
"""Type of a field: dtype, row rank, tail shape."""


@dataclass(slots=True)
class Schema:
    """Types of fields and tags, which the first puts of a partition set and later ones must match."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    tag_types: dict[str, type] = field(default_factory=dict)

    def check(self, meta: KVBatchMeta, known: Sequence[Row]) -> None:
        """Checks a put before anything of it is stored; ``known`` are its rows that already exist.

        Raises:
            AlreadyExistsError: If a key already has one of the fields.
            InvalidArgumentError: If the put breaks a rule.
        """
        if not meta.keys or len(set(meta.keys)) != len(meta.keys):
            raise InvalidArgumentError("expected at least one key and no duplicate keys")
        for column in meta.fields:
            self._check_column(column, meta.blobs)
        names = set(meta.field_names)
        if len(names) != len(meta.fields) or len(meta.blobs) != len(meta.fields):
            raise InvalidArgumentError("expected one blob for each field and no duplicate fields")
        for row in known:
            again = names & row.field_names()
            if again:
                raise AlreadyExistsError(
                    f"{row.key} already has {', '.join(sorted(again))}, and stored values are immutable; "
                    "release the key before storing it again",
                    key=row.key,
                    fields=",".join(sorted(again)),
                )
        self._check_tags(meta, has_new_keys=len(known) < len(meta.keys))

    def add_types(self, meta: KVBatchMeta) -> None:
        """Adds the types of a checked put."""
        for column in meta.fields:
            self.kinds[column.name] = _kind(column)
        for name, values in meta.tags.items():
            self.tag_types.setdefault(name, type(values[0]))

    def _check_column(self, column: FieldColumn, blobs: Sequence[BlobRef]) -> None:
        kind = _kind(column)
        expected = self.kinds.get(column.name, kind)
        if kind != expected:
            raise InvalidArgumentError(
                f"field {column.name!r}: expected {_text(expected)} as in this partition, got "
                f"{_text(kind)}; convert it first",
                field=column.name,
            )
        if column.dtype not in ITEM_BYTES:
            raise InvalidArgumentError(
                f"field {column.name!r} has unsupported dtype {column.dtype!r}; use one of "
                f"{', '.join(ITEM_BYTES)}",
                field=column.name,
            )
        blob_index = column.blob_indexes[0]
        if blob_index < 0 or column.blob_indexes.count(blob_index) < len(column.blob_indexes):
            raise InvalidArgumentError(f"field {column.name!r} must be in one blob")
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
                f"all samples of a partition need the same tags, {sorted(self.tag_types)}; "
                f"got {sorted(meta.tags)}"
            )
        for name, values in meta.tags.items():
            known = self.tag_types.get(name, type(values[0]))
            if known is not type(values[0]):
                raise InvalidArgumentError(
                    f"tag {name!r}: expected {known.__name__} as in earlier samples, got "
                    f"{type(values[0]).__name__}",
                    tag=name,
                )


def _kind(column: FieldColumn) -> Kind:
    return column.dtype, column.row_rank, column.tail_shape


def _text(kind: Kind) -> str:
    dtype, row_rank, tail_shape = kind
    return f"{dtype} of rank {row_rank} with tail shape {list(tail_shape)}"
