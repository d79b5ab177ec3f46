"""Columns of CSV files, whose cells are text: a type is used only if its values print as they are written.

The library ``datasets`` reads ``007`` as 7, ``0.10`` as .1, ``true`` as True and ``NA`` as a missing value,
which no response equals.
"""

import csv
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

_MAX_INTEGER: Final = 2**63
_MAX_HEADER_CHARACTERS: Final = 1 << 20


def text_columns(builder: Any, split: str) -> dict[str, Any]:
    """Returns the options of ``datasets.load_dataset`` that read all cells of CSV files as text.

    Args:
        builder: Builder of the dataset.
        split: Name of the split.

    Returns:
        Empty for other files, and for those whose types the dataset declares.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    config = builder.config
    files = (getattr(config, "data_files", None) or {}).get(split.partition("[")[0])
    if not isinstance(config, CsvConfig) or not files or config.features or builder.info.features:
        return {}
    names = config.names or _header(str(files[0]), config.sep)
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def _header(file: str, separator: str) -> list[str]:
    """Returns the first record of a file.

    Raises:
        ValueError: If there is none.
    """
    import fsspec  # type: ignore[import-untyped]

    with fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as lines:
        text = lines.read(_MAX_HEADER_CHARACTERS)
    for record in csv.reader(text.splitlines(keepends=True), delimiter=separator):
        if record:
            return record
    raise ValueError(f"{file} has no header; write the names of the columns into its first line")


def typed(rows: Any, *, numbers: Collection[str]) -> Any:
    """Converts columns of text whose every value prints as it is written; empty cells are null.

    Args:
        rows: Dataset with columns of text.
        numbers: Columns that become numbers although that changes how they are written.
    """
    import datasets

    kinds = {"int64": _is_integer, "float64": _is_float, "bool": {"True", "False"}.__contains__}
    for name in rows.column_names:
        cells = rows[name]
        if name in numbers and _all(_is_number, cells):
            kind = "int64" if _all(_is_integer, cells) else "float64"
        else:
            kind = next((kind for kind, fits in kinds.items() if _all(fits, cells)), "")
        if kind:
            rows = rows.cast_column(name, datasets.Value(kind))
    return rows


def _all(fits: Callable[[str], bool], cells: Iterable[str | None]) -> bool:
    """Returns True if there is a cell that is not empty, and all of those fit."""
    is_empty = True
    for cell in cells:
        if cell is not None:
            is_empty = False
            if not fits(cell):
                return False
    return not is_empty


def _is_integer(cell: str) -> bool:
    try:
        number = int(cell)
    except ValueError:
        return False
    return str(number) == cell and -_MAX_INTEGER <= number < _MAX_INTEGER


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_float(cell: str) -> bool:
    return _is_number(cell) and repr(float(cell)) == cell
