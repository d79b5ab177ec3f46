"""Rows of Arrow tables: Parquet files, and datasets of the library ``datasets``."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.runspec.data import PromptSourceSpec
from services.extras.tables.text_cells import compared_columns, text_columns, typed
from services.rollout.data.sources import CheckedRows, PromptSource, Row, file_of

# Max bytes of a decoded Parquet file to hold in memory; a larger one is copied to disk.
_MAX_HELD_BYTES = 256 << 20
_ROWS_COPIED = 16_384


def _row_of_arrow(row: Mapping[str, Any]) -> Row:
    """Returns a row of an Arrow table, in whose messages and tools keys that the row lacks are absent.

    Arrow gives each object the keys of all rows, with null for those that the row does not have. In other
    columns, where null may be a value, the keys stay.
    """
    return {
        name: _without_nulls(value) if name == "tools" else _without_nulls_in_chats(value)
        for name, value in row.items()
    }


def _without_nulls_in_chats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls_in_chats(item) for key, item in value.items()}
    if not isinstance(value, list) or not value:
        return value
    is_chat = all(isinstance(item, Mapping) and "role" in item for item in value)
    return [_without_nulls(item) if is_chat else _without_nulls_in_chats(item) for item in value]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _Parquet:
    """A Parquet file; a large one is copied to a memory-mapped file instead of held in memory."""

    def __init__(self, path: Path, key: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._path = path
        try:
            file = parquet.ParquetFile(path, memory_map=True)
            _check_names(file.schema_arrow, f"{key}: {path}")
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            is_large = sum(group.total_byte_size for group in groups) > _MAX_HELD_BYTES
            self._table = _mapped(file) if is_large else file.read()
        except (pa.ArrowException, OSError) as error:  # a damaged file raises either
            raise ValueError(
                f"{key}: {path} cannot be read as a Parquet file ({str(error).strip()}); check the path, or "
                "write the file again"
            ) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Row:
        try:
            rows = self._table.slice(index, 1).to_pylist(maps_as_pydicts="strict")
        except KeyError as error:
            raise ValueError(
                f"row {index} of {self._path} has a map with a key more than once ({error.args[0]}); keep "
                "one of its values"
            ) from error
        return _row_of_arrow(rows[0])


def _check_names(fields: Any, key: str) -> None:
    """Raises ValueError if columns, or fields of a nested column, have the same name."""
    import pyarrow as pa

    kinds = {field.name: field.type for field in fields}
    if len(kinds) < len(fields):
        (name, _), *_ = Counter(field.name for field in fields).most_common(1)
        raise ValueError(
            f"{key} has the column {name!r} more than once; rename or remove all but one of them"
        )
    for name, kind in kinds.items():
        if pa.types.is_nested(kind):
            _check_names([kind.field(i) for i in range(kind.num_fields)], f"{key}: {name!r}")


def _mapped(file: Any) -> Any:
    """Returns a Parquet file's table, mapped from an unlinked copy that disappears with the process."""
    import pyarrow as pa

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rows.arrow")
        with pa.OSFile(path, "wb") as copy, pa.ipc.new_file(copy, file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=_ROWS_COPIED):
                writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(path)).read_all()


class _ArrowRows(CheckedRows):
    """Rows of a dataset of the library ``datasets``."""

    def __getitem__(self, index: int, /) -> Row:
        return _row_of_arrow(super().__getitem__(index))


def open_parquet(spec: PromptSourceSpec, key: str) -> PromptSource:
    return _Parquet(file_of(spec, key), key)


def open_huggingface(spec: PromptSourceSpec, key: str) -> PromptSource:
    if Path(spec.path).is_file():
        raise ValueError(
            f"{key}.path: {spec.path!r} is a file, but source 'huggingface' reads a dataset's id or folder; "
            "set the source to jsonl, csv or parquet if it is one, or return its rows from a Python function "
            "(source 'python')"
        )
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"{key} needs the package 'datasets'; pip install datasets") from error
    try:
        builder = datasets.load_dataset_builder(spec.path, name=spec.subset)
        as_text = text_columns(builder, spec.split)
        rows = datasets.load_dataset(spec.path, name=spec.subset, split=spec.split, **as_text)
        if as_text:
            numbers, booleans = compared_columns(spec)
            rows = typed(rows, numbers=numbers, booleans=booleans)
    except Exception as error:  # the library raises many kinds, some without a common class
        why = str(error)
        if type(error) is datasets.exceptions.DatasetGenerationError:  # only its cause says why
            why = f"{error.__cause__!r:.300}"
        raise ValueError(
            f"{key}: the dataset {spec.path!r} (subset {spec.subset!r}, split {spec.split!r}) cannot be "
            f"loaded ({why}); check {key}.path, {key}.subset and {key}.split"
        ) from error
    return _ArrowRows(rows, spec.path)
