"""Builds the columns of a ``KVBatchMeta`` from rows."""

from collections.abc import Sequence

from services.transferqueue.index.columns import ColumnRange, Row, Values
from services.transferqueue.index.schema import Schema
from services.wire.batch import MISSING, BlobRef, FieldColumn, TagValues


class MetaBuilder:
    """Collects columns over runs of rows that have the same column ranges."""

    def __init__(self, schema: Schema) -> None:
        self._kinds = schema.kinds
        self._num_rows = 0
        self._columns: dict[str, tuple[list[int], list[int], list[int]]] = {}
        self._tags: dict[str, list[int | float | str]] = {name: [] for name in schema.tag_types}
        self.blob_numbers: dict[BlobRef, int] = {}

    def add_run(self, parts: tuple[ColumnRange, ...], rows: Sequence[Row]) -> None:
        """Appends rows that share their column ranges."""
        tags: dict[str, tuple[Values, list[int]]] = {}
        for number, part in enumerate(parts):
            places = [row.places[number] for row in rows]
            tags.update(
                (name, (values, places))
                for name, values in zip(part.tags, part.tag_values, strict=True)
            )
            puts = list(map(part.puts.__getitem__, places))
            for field_number, name in enumerate(part.fields):
                self._add_field(part, field_number, name, places, puts)
        for name, (values, tag_places) in tags.items():
            self._tags[name] += [values[place] for place in tag_places]
        self._num_rows += len(rows)
        for lists in self._columns.values():
            _pad(lists, self._num_rows)

    def _add_field(
        self, part: ColumnRange, number: int, name: str, places: Sequence[int], puts: Sequence[int]
    ) -> None:
        blobs = {
            put: self.blob_numbers.setdefault(part.blob(put, number), len(self.blob_numbers))
            for put in dict.fromkeys(puts)
        }
        column = self._column(name)
        column[0].extend(map(part.lengths[number].__getitem__, places))
        column[1].extend(map(blobs.__getitem__, puts))
        column[2].extend(map(part.offsets[number].__getitem__, places))

    def _column(self, name: str) -> tuple[list[int], list[int], list[int]]:
        lists = self._columns.setdefault(name, ([], [], []))
        _pad(lists, self._num_rows)
        return lists

    def fields(self) -> tuple[FieldColumn, ...]:
        """Returns the columns of the fields."""
        built = []
        for name, (lengths, blob_indexes, offsets) in self._columns.items():
            dtype, row_rank, tail_shape = self._kinds[name]
            built.append(
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
        return tuple(built)

    def tags(self) -> dict[str, TagValues]:
        """Returns the columns of the tags."""
        return {name: tuple(values) for name, values in self._tags.items()}  # type: ignore[misc]


def _pad(lists: tuple[list[int], list[int], list[int]], num_rows: int) -> None:
    lengths, blob_indexes, offsets = lists
    absent = num_rows - len(lengths)
    if absent > 0:
        lengths += [0] * absent
        blob_indexes += [MISSING] * absent
        offsets += [0] * absent
