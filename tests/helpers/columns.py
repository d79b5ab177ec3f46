"""Columns of samples, row by row."""

from torch import Tensor

from services.wire.data.encoding.packing import Values
from services.wire.data.jagged import Jagged


def rows_of(values: Values) -> list[Tensor]:
    """Returns one tensor for each sample."""
    return values.unbind() if isinstance(values, Jagged) else [*values]
