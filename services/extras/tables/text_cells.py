"""Columns of CSV files, whose cells are text: a type is used only if its values print as they are written.

The library ``datasets`` reads ``007`` as 7, ``0.10`` as .1, ``true`` as True and ``NA`` as a missing value,
which no response equals.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from services.common.runspec.data import PromptSourceSpec

_MAX_INTEGER: Final = 2**63

Cell = str | int | float | bool | None


def compared_columns(spec: PromptSourceSpec) -> tuple[set[str], set[str]]:
    """Returns the columns whose values a filter compares with numbers, and those compared with booleans."""
    numbers, booleans = set[str](), set[str]()
    for filter_ in spec.filters:
        if filter_.column is None:
            continue
        kinds = {type(value) for value in filter_.one_of or () if value is not None}
        if kinds == {bool}:
            booleans.add(filter_.column)
        has_bounds = filter_.at_least is not None or filter_.at_most is not None
        if has_bounds or (kinds and kinds <= {int, float}):
            numbers.add(filter_.column)
    return numbers, booleans


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
    names = config.names or _header(str(files[0]), config.pd_read_csv_kwargs)
    if not all(isinstance(name, str) for name in names):  # numbers of columns without a header
        return {}
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def _header(file: str, options: Mapping[str, Any]) -> list[Any]:
    """Returns the names of a file's columns as pandas calls them, such as ``Unnamed: 0`` of an empty one.

    Args:
        options: Arguments of ``pandas.read_csv``.

    Raises:
        ValueError: If there is none.
    """
    import fsspec  # type: ignore[import-untyped]
    import pandas  # type: ignore[import-untyped]

    reading = {**options, "chunksize": None, "nrows": 0}
    with fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer") as lines:
        try:
            return list(pandas.read_csv(lines, **reading).columns)
        except pandas.errors.EmptyDataError as error:
            raise ValueError(
                f"{file} has no header; write the names of the columns into its first line"
            ) from error


def typed(rows: Any, *, numbers: Collection[str], booleans: Collection[str] = ()) -> Any:
    """Converts columns of text whose every value prints as it is written; empty cells are null.

    Args:
        rows: Dataset with columns of text.
        numbers: Columns that become numbers although that changes how they are written.
        booleans: Columns that become booleans although that changes how they are written.
    """
    import datasets

    for name in rows.column_names:
        kind = _kind(rows[name], is_number=name in numbers, is_boolean=name in booleans)
        if kind:
            rows = rows.cast_column(name, datasets.Value(kind))
    return rows


def typed_cells(
    columns: Mapping[str, Sequence[str | None]],
    *,
    numbers: Collection[str],
    booleans: Collection[str],
) -> dict[str, Sequence[Cell]]:
    """Converts columns as :func:`typed` does, without the library ``datasets``."""
    converted: dict[str, Sequence[Cell]] = {}
    for name, cells in columns.items():
        kind = _kind(cells, is_number=name in numbers, is_boolean=name in booleans)
        convert = _CONVERSIONS.get(kind)
        converted[name] = (
            [None if cell is None else convert(cell) for cell in cells] if convert else cells
        )
    return converted


def _kind(cells: Iterable[str | None], *, is_number: bool, is_boolean: bool) -> str:
    """Returns the type of a column, by its name in ``datasets``; empty for text.

    Args:
        is_number: True if the column becomes numbers although that changes how they are written.
        is_boolean: True if it becomes booleans although that changes how they are written.
    """
    if is_number and _all(_is_number, cells):
        return "int64" if _all(_is_integer, cells) else "float64"
    if is_boolean and _all(_is_boolean, cells):
        return "bool"
    return next((kind for kind, fits in _KINDS.items() if _all(fits, cells)), "")


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


def _is_boolean(cell: str) -> bool:
    return cell in ("true", "TRUE", "True", "false", "FALSE", "False")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_float(cell: str) -> bool:
    return _is_number(cell) and repr(float(cell)) == cell


_KINDS: Final[Mapping[str, Callable[[str], bool]]] = {
    "int64": _is_integer,
    "float64": _is_float,
    "bool": {"True", "False"}.__contains__,
}
_CONVERSIONS: Final[Mapping[str, Callable[[str], Cell]]] = {
    "int64": int,
    "float64": float,
    "bool": lambda cell: cell.lower() == "true",
}
