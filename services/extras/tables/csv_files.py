"""CSV files as sources of prompts, without a further package."""

import csv
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.runspec.data import PromptSourceSpec
from services.extras.tables.text_cells import Cell, compared_columns, typed_cells
from services.rollout.data.sources import PromptSource, Row, file_of

_DELIMITERS = (",", ";", "\t")
_QUOTED = re.compile(r'"[^"]*(?:"|$)')


def open_csv(spec: PromptSourceSpec, key: str) -> PromptSource:
    """Opens a CSV file with a header, separated by commas, semicolons or tabs as the header is.

    Columns become numbers or booleans as :mod:`services.extras.tables.text_cells` says; empty cells are None.

    Raises:
        ValueError: With the key and the line, if the file is not such a file.
    """
    path = file_of(spec, key)
    try:
        columns = _read(path)
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"{key}: {path} cannot be read as a CSV file ({error}); expected UTF-8, a first line with the "
            "names of the columns, and as many cells in each further row"
        ) from error
    numbers, booleans = compared_columns(spec)
    return _Columns(typed_cells(columns, numbers=numbers, booleans=booleans))


class _Columns:
    """Rows of columns of equal length, which are held in memory."""

    def __init__(self, columns: Mapping[str, Sequence[Cell]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int, /) -> Row:
        return {name: cells[index] for name, cells in self._columns.items()}


def _read(path: Path) -> dict[str, list[str | None]]:
    """Returns the cells of a file by column.

    Raises:
        ValueError: If there is no header, a column occurs twice, or a row has another number of cells.
    """
    csv.field_size_limit(sys.maxsize)  # prompts may be longer than the library's limit of 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        delimiter = max(_DELIMITERS, key=_QUOTED.sub("", header).count)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(reader, [])
        if not any(names):
            raise ValueError("there is no header")
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            raise ValueError(f"the column {name!r} occurs {count} times")
        columns: dict[str, list[str | None]] = {name: [] for name in names}
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"the row that ends in line {reader.line_num} has {len(cells)} cells, and the header "
                    f"{len(names)}"
                )
            for name, cell in zip(names, cells, strict=True):
                columns[name].append(cell or None)
    return columns
