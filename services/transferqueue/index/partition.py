"""Samples of one partition: rows, their fields, and a log of changes by revision."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from operator import add, attrgetter

from services.common.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from services.transferqueue.index.columns import (
    ColumnRange,
    Extension,
    Layout,
    Row,
    Values,
    layout_of,
    single_put,
)
from services.wire.batch import MISSING, BlobRef, FieldColumn, KVBatchMeta, TagValues
from services.wire.data.encoding.codec import ITEM_BYTES, check_dtype

Kind = tuple[str, int, tuple[int, ...]]
"""Type of a field: dtype, row rank, tail shape."""


@dataclass(slots=True)
class Schema:
    """Types of fields and tags, which the first puts of a partition set and later ones must match."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    tag_types: dict[str, type] = field(default_factory=dict)

    def check(self, meta: KVBatchMeta, rows: Sequence[Row]) -> None:
        """Checks a put before anything of it is stored; ``rows`` are its rows that already exist.

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
        for row in rows:
            again = names & row.field_names()
            if again:
                raise AlreadyExistsError(
                    f"{row.key} already has {', '.join(sorted(again))}, and stored values are immutable; "
                    "release the key before storing it again",
                    key=row.key,
                    fields=",".join(sorted(again)),
                )
        self._check_tags(meta, has_new_keys=len(rows) < len(meta.keys))

    def add_types(self, meta: KVBatchMeta) -> None:
        for column in meta.fields:
            self.kinds[column.name] = _kind(column)
        for name, values in meta.tags.items():
            self.tag_types.setdefault(name, type(values[0]))

    def _check_column(self, column: FieldColumn, blobs: Sequence[BlobRef]) -> None:
        kind = _kind(column)
        expected_kind = self.kinds.get(column.name, kind)
        if kind != expected_kind:
            raise InvalidArgumentError(
                f"field {column.name!r}: expected {_text(expected_kind)} as in this partition, got "
                f"{_text(kind)}; convert it first",
                field=column.name,
            )
        check_dtype(column.name, column.dtype)
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
            tag_type = self.tag_types.get(name, type(values[0]))
            if tag_type is not type(values[0]):
                raise InvalidArgumentError(
                    f"tag {name!r}: expected {tag_type.__name__} as in earlier samples, got "
                    f"{type(values[0]).__name__}",
                    tag=name,
                )


def _kind(column: FieldColumn) -> Kind:
    return column.dtype, column.row_rank, column.tail_shape


def _text(kind: Kind) -> str:
    dtype, row_rank, tail_shape = kind
    return f"{dtype} of rank {row_rank} with tail shape {list(tail_shape)}"


class MetaBuilder:
    """Collects columns from sequences of rows; the rows of a sequence have the same column ranges."""

    def __init__(self, schema: Schema) -> None:
        self._kinds = schema.kinds
        self._num_rows = 0
        self._columns: dict[str, tuple[list[int], list[int], list[int]]] = {}
        self._tags: dict[str, list[int | float | str]] = {name: [] for name in schema.tag_types}
        self.blob_numbers: dict[BlobRef, int] = {}

    def add_run(self, ranges: tuple[ColumnRange, ...], rows: Sequence[Row]) -> None:
        """Appends rows that share their column ranges."""
        tags: dict[str, tuple[Values, list[int]]] = {}
        for number, columns in enumerate(ranges):
            indexes = [row.places[number] for row in rows]
            tags.update(
                (name, (values, indexes))
                for name, values in zip(columns.tags, columns.tag_values, strict=True)
            )
            puts = list(map(columns.puts.__getitem__, indexes))
            for field_number, name in enumerate(columns.fields):
                self._add_field(columns, field_number, name, indexes, puts)
        for name, (values, tag_places) in tags.items():
            self._tags[name] += [values[index] for index in tag_places]
        self._num_rows += len(rows)
        for lists in self._columns.values():
            _pad(lists, self._num_rows)

    def _add_field(
        self,
        columns: ColumnRange,
        number: int,
        name: str,
        indexes: Sequence[int],
        puts: Sequence[int],
    ) -> None:
        blobs = {
            put: self.blob_numbers.setdefault(columns.blob(put, number), len(self.blob_numbers))
            for put in dict.fromkeys(puts)
        }
        column = self._column(name)
        column[0].extend(map(columns.lengths[number].__getitem__, indexes))
        column[1].extend(map(blobs.__getitem__, puts))
        column[2].extend(map(columns.offsets[number].__getitem__, indexes))

    def _column(self, name: str) -> tuple[list[int], list[int], list[int]]:
        lists = self._columns.setdefault(name, ([], [], []))
        _pad(lists, self._num_rows)
        return lists

    def fields(self) -> tuple[FieldColumn, ...]:
        fields = []
        for name, (lengths, blob_indexes, offsets) in self._columns.items():
            dtype, row_rank, tail_shape = self._kinds[name]
            fields.append(
                FieldColumn(
                    name=name,
                    dtype=dtype,
                    row_rank=row_rank,
                    tail_shape=tail_shape,
                    lengths=tuple(lengths),
                    blob_indexes=tuple(blob_indexes),
                    offsets=tuple(offsets),
                )
            )
        return tuple(fields)

    def tags(self) -> dict[str, TagValues]:
        return {name: tuple(values) for name, values in self._tags.items()}  # type: ignore[misc]


def _pad(lists: tuple[list[int], list[int], list[int]], num_rows: int) -> None:
    lengths, blob_indexes, offsets = lists
    absent = num_rows - len(lengths)
    if absent > 0:
        lengths += [0] * absent
        blob_indexes += [MISSING] * absent
        offsets += [0] * absent


_MIN_LOG_ENTRIES = 1024


class Partition:
    """Samples of one run and one purpose.

    A sample's row is complete when all required fields are stored; then it enters the log, and
    again on each later change. Watchers follow the log.

    Args:
        required_fields: Fields that a complete sample has.
    """

    def __init__(self, partition_id: str, required_fields: Sequence[str]) -> None:
        self.partition_id = partition_id
        self.required_fields = frozenset(required_fields)
        self.revision = 0
        self.stored_bytes = 0
        self.rows: dict[str, Row] = {}
        self.num_complete = 0
        self._schema = Schema()
        self._open: dict[Layout, tuple[ColumnRange]] = {}
        self._log_rows: list[Row] = []
        self._log_revisions = array("q")

    def add(self, meta: KVBatchMeta) -> list[Extension]:
        """Adds the keys and fields of a put.

        Returns:
            The rows, grouped by the fields that they had before.

        Raises:
            AlreadyExistsError: If a key already has one of the fields.
            InvalidArgumentError: If the put contradicts itself or the partition.
        """
        earlier = list(map(self.rows.get, meta.keys))
        extended = [(row, index) for index, row in enumerate(earlier) if row is not None]
        self._schema.check(meta, [row for row, _ in extended])
        self._schema.add_types(meta)
        self.stored_bytes += sum(blob.size_bytes for blob in meta.blobs)
        alone = self._open_part(layout_of(meta))
        first = alone[0].append(meta)
        indexes = map(single_put, range(first, first + meta.num_keys))
        new = [
            Row(key, alone, index)
            for key, row, index in zip(meta.keys, earlier, indexes, strict=True)
            if row is None
        ]
        self.rows.update(zip([row.key for row in new], new, strict=True))
        fields = frozenset(meta.field_names)
        extensions = [Extension(new, frozenset(), fields)] if new else []
        extensions += _extend([(row, first + index) for row, index in extended], alone[0])
        for extension in extensions:
            if self.required_fields <= extension.after:
                self._log(extension.rows)
        if len(self._log_rows) > 2 * self.num_complete + _MIN_LOG_ENTRIES:
            self._compact_log()
        return extensions

    def get(self, keys: Sequence[str]) -> list[Row]:
        """Returns rows by key.

        Raises:
            NotFoundError: If a key does not exist; ``metadata["keys"]`` lists the missing ones.
        """
        absent = [key for key in keys if key not in self.rows]
        if absent:
            raise NotFoundError(
                f"{len(absent)} of {len(keys)} keys are not in {self.partition_id}: "
                f"{', '.join(absent[:20])}; they were released, lost or never stored",
                partition_id=self.partition_id,
                keys=",".join(absent),
            )
        return [self.rows[key] for key in keys]

    def remove(self, rows: Sequence[Row]) -> list[BlobRef]:
        """Deletes rows; returns the blobs that no row uses any more."""
        for row in rows:
            del self.rows[row.key]
            self.num_complete -= row.revision > 0
            row.revision = Row.DELETED
        unused = [blob for columns, indexes in _by_part(rows) for blob in columns.remove(indexes)]
        self.stored_bytes -= sum(blob.size_bytes for blob in unused)
        return unused

    def rows_on(self, shard_id: str) -> list[Row]:
        ranges = {id(columns): columns for row in self.rows.values() for columns in row.parts}
        hit = {number for number, columns in ranges.items() if shard_id in columns.shard_ids}
        return [
            row for row in self.rows.values() if any(id(columns) in hit for columns in row.parts)
        ]

    def changes_since(self, revision: int, *, limit: int) -> tuple[KVBatchMeta | None, int]:
        """Describes complete samples that are new or changed after ``revision``.

        Returns:
            Description of at most ``limit`` samples, or None without changes, and the revision to
            continue from.
        """
        start = bisect_right(self._log_revisions, revision)
        entries = zip(self._log_revisions[start:], self._log_rows[start:], strict=True)
        rows: list[Row] = []
        for entry_revision, row in entries:
            if row.revision == entry_revision:
                rows.append(row)
            revision = entry_revision
            if len(rows) == limit:
                break
        else:
            revision = max(revision, self.revision)
        return (self.describe(rows, revision=revision) if rows else None), revision

    def describe(
        self, rows: Sequence[Row], *, revision: int | None = None, lease_id: str = ""
    ) -> KVBatchMeta:
        builder = MetaBuilder(self._schema)
        for ranges, run in groupby(rows, key=attrgetter("parts")):
            builder.add_run(ranges, list(run))
        return KVBatchMeta(
            partition_id=self.partition_id,
            keys=tuple([row.key for row in rows]),
            fields=builder.fields(),
            blobs=tuple(builder.blob_numbers),
            tags=builder.tags(),
            lease_id=lease_id,
            revision=self.revision if revision is None else revision,
        )

    def describe_puts(self) -> tuple[KVBatchMeta, ...]:
        """Describes all samples; each description has the samples that came with the same puts."""
        by_puts: dict[tuple[tuple[ColumnRange, int], ...], list[Row]] = {}
        for row in self.rows.values():
            locations = zip(row.parts, row.places, strict=True)
            puts = tuple([(columns, columns.puts[index]) for columns, index in locations])
            by_puts.setdefault(puts, []).append(row)
        return tuple(self.describe(rows) for rows in by_puts.values())

    def _open_part(self, layout: Layout) -> tuple[ColumnRange]:
        """Returns the range for the next put of a layout, in a tuple that its rows share."""
        open_parts = self._open.get(layout)
        if open_parts is None or open_parts[0].is_full:
            open_parts = self._open[layout] = (ColumnRange(layout),)
        return open_parts

    def _log(self, rows: Sequence[Row]) -> None:
        self.num_complete += sum([row.revision == 0 for row in rows])
        revisions = range(self.revision + 1, self.revision + 1 + len(rows))
        for revision, row in zip(revisions, rows, strict=True):
            row.revision = revision
        self.revision += len(rows)
        self._log_rows += rows
        self._log_revisions.extend(revisions)

    def _compact_log(self) -> None:
        live = [
            (revision, row)
            for revision, row in zip(self._log_revisions, self._log_rows, strict=True)
            if row.revision == revision
        ]
        self._log_revisions = array("q", [revision for revision, _ in live])
        self._log_rows = [row for _, row in live]


def find(partitions: Mapping[str, Partition], partition_id: str) -> Partition:
    """Returns a partition by its id.

    Raises:
        NotFoundError: If there is none.
    """
    partition = partitions.get(partition_id)
    if partition is None:
        raise NotFoundError(
            f"partition {partition_id!r} does not exist; create it first",
            partition_id=partition_id,
        )
    return partition


def _by_part(rows: Sequence[Row]) -> Iterator[tuple[ColumnRange, list[int]]]:
    """Yields column ranges and the rows' indexes in them, for each sequence of rows with the same ranges."""
    for ranges, run in groupby(rows, key=attrgetter("parts")):
        indexes = [row.places for row in run]
        for number, columns in enumerate(ranges):
            yield columns, [of_row[number] for of_row in indexes]


def _extend(extended_rows: Sequence[tuple[Row, int]], columns: ColumnRange) -> list[Extension]:
    alike: dict[tuple[ColumnRange, ...], list[tuple[Row, int]]] = {}
    for row, index in extended_rows:
        alike.setdefault(row.parts, []).append((row, index))
    extensions = []
    for ranges, same_rows in alike.items():
        before = same_rows[0][0].field_names()
        extended = (*ranges, columns)
        for row, index in same_rows:
            row.parts = extended
            row.places = (*row.places, index)
        rows = [row for row, _ in same_rows]
        extensions.append(Extension(rows, before, before | set(columns.fields)))
    return extensions
