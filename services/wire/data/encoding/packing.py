"""Converts tensors to byte columns and back."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from services.common.errors import InvalidArgumentError
from services.wire.batch import FieldColumn
from services.wire.data.encoding.codec import ITEM_BYTES, check_dtype, parts_of
from services.wire.data.jagged import Jagged, rows_problem

Values = Jagged | Tensor | Sequence[Tensor]
"""Values of one field: rows as ``Jagged``, a tensor whose first dimension counts the samples, or a
list of tensors.
"""


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Part of a column that fits in one frame."""

    begin: int
    """Offset of its first byte in the column."""
    size: int
    """Size in bytes."""
    pieces: Sequence[Tensor]
    """The bytes in order, as one-dimensional CPU tensors of one dtype."""

    def copy_into(self, target: Tensor) -> memoryview:
        """Copies the part into ``target``, uint8 of ``size``; returns its bytes."""
        values = target.view(self.pieces[0].dtype)
        with torch.no_grad():
            if len(self.pieces) == 1:
                values.copy_(self.pieces[0])
            else:
                torch.cat(tuple(self.pieces), out=values)
        return target.numpy().data

    def in_place(self) -> memoryview | None:
        """Returns the bytes without a copy if possible; None if they are in several tensors."""
        if len(self.pieces) > 1:
            return None
        return self.pieces[0].detach().contiguous().view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedColumn:
    """Values of one field, ready to send."""

    name: str
    dtype: str
    row_rank: int
    tail_shape: tuple[int, ...]
    lengths: tuple[int, ...]
    """Length of each sample's first dimension."""
    offsets: tuple[int, ...]
    """Byte offset of each sample."""
    pieces: tuple[Tensor, ...]
    """The bytes in order, as one-dimensional CPU tensors of one dtype."""
    bounds: tuple[int, ...]
    """First byte of each piece, then the end of the last one."""

    @property
    def size_bytes(self) -> int:
        return self.bounds[-1]

    def parts(self) -> list[ColumnPart]:
        """Splits the column into parts; also splits pieces that cross the end of a part."""
        item = self.pieces[0].element_size()
        parts = []
        for begin, size in parts_of(self.size_bytes):
            first = bisect_right(self.bounds, begin) - 1
            last = bisect_left(self.bounds, begin + size) - 1
            pieces = list(self.pieces[first : last + 1])
            pieces[-1] = pieces[-1][: (begin + size - self.bounds[last]) // item]
            pieces[0] = pieces[0][(begin - self.bounds[first]) // item :]
            parts.append(ColumnPart(begin, size, pieces))
        return parts

    def joined(self) -> memoryview:
        """Returns all bytes of the column."""
        if (
            not self.size_bytes
        ):  # the stride of an empty tensor may be 0, which has no view as bytes
            return memoryview(b"")
        whole = torch.cat(self.pieces) if len(self.pieces) > 1 else self.pieces[0].contiguous()
        return whole.detach().view(torch.uint8).numpy().data

    def to_field(self, blob_index: int) -> FieldColumn:
        """Returns the column's description as the blob ``blob_index``."""
        return FieldColumn(
            name=self.name,
            dtype=self.dtype,
            row_rank=self.row_rank,
            tail_shape=self.tail_shape,
            lengths=self.lengths,
            blob_indexes=(blob_index,) * len(self.lengths),
            offsets=self.offsets,
        )


def pack(name: str, values: Values) -> PackedColumn:
    """Packs the values of one field, one row per key.

    Raises:
        InvalidArgumentError: If the dtype is not supported or the rows' types or shapes differ.
    """
    if isinstance(values, Tensor):
        return _pack_dense(name, values)
    if isinstance(values, Jagged):
        rank = 0 if values.is_scalar else values.values.dim()
        lengths = values.lengths.tolist()
        return _column(name, [values.values], lengths, rank, tuple(values.values.shape[1:]))
    other_kinds = {kind.__name__ for kind in set(map(type, values)) if not issubclass(kind, Tensor)}
    if other_kinds or not values:
        raise InvalidArgumentError(
            f"field {name!r}: expected one tensor per key, got {', '.join(sorted(other_kinds)) or 'none'}",
            field=name,
        )
    return _pack_rows(name, values)


def share(name: str, row: Tensor, num_keys: int) -> PackedColumn:
    """Packs one row that all keys share."""
    column = _pack_rows(name, [row])
    return replace(column, lengths=column.lengths * num_keys, offsets=column.offsets * num_keys)


def select_rows(values: Values, indexes: Sequence[int]) -> Values:
    """Selects rows of a field's values by index."""
    if isinstance(values, Jagged):
        return values.select(indexes)
    if isinstance(values, Tensor):
        return values[torch.tensor(indexes, dtype=torch.int64)]
    return [values[index] for index in indexes]


def unpack(column: FieldColumn, data: Tensor) -> Jagged:
    """Views bytes as the rows that ``column`` describes.

    Args:
        column: Type and lengths of the rows.
        data: uint8, the rows one after the other, aligned for the dtype.
    """
    values = data.view(getattr(torch, column.dtype))
    if column.tail_shape:
        values = values.view(sum(column.lengths), *column.tail_shape)
    lengths = torch.from_numpy(np.array(column.lengths, dtype=np.int64))
    return Jagged(values, lengths, is_scalar=column.row_rank == 0)


def _pack_dense(name: str, tensor: Tensor) -> PackedColumn:
    if tensor.dim() == 0:
        raise InvalidArgumentError(f"field {name!r}: expected one row per key, got one number")
    num_rows, *shape = tensor.shape
    length = shape[0] if shape else 1
    return _column(name, [tensor.reshape(-1)], [length] * num_rows, len(shape), tuple(shape[1:]))


def _pack_rows(name: str, rows: Sequence[Tensor]) -> PackedColumn:
    first = rows[0]
    rank, tail = first.dim(), first.shape[1:]
    if problem := rows_problem(rows):
        raise InvalidArgumentError(f"field {name!r} has {problem}", field=name)
    # For rank 0 and 1 the length is the number of elements; ``len`` of a tensor is slow.
    lengths = list(map(Tensor.numel, rows)) if rank < 2 else [row.shape[0] for row in rows]
    return _column(name, rows, lengths, rank, tuple(tail))


def _column(
    name: str, tensors: Sequence[Tensor], lengths: list[int], rank: int, tail: tuple[int, ...]
) -> PackedColumn:
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    check_dtype(name, dtype)
    row_bytes = ITEM_BYTES[dtype] * prod(tail)
    is_float8 = dtype.startswith("float8")
    pieces = tuple(tensors if rank == 1 else [tensor.reshape(-1) for tensor in tensors])
    if is_float8 or not pieces[0].is_cpu:
        # torch cannot concatenate float8 tensors, only their bytes.
        pieces = tuple([_bytes_of(piece) if is_float8 else piece.cpu() for piece in pieces])
    bounds = tuple(accumulate([length * row_bytes for length in lengths], initial=0))
    return PackedColumn(
        name=name,
        dtype=dtype,
        row_rank=rank,
        tail_shape=tail,
        lengths=tuple(lengths),
        offsets=bounds[:-1],
        pieces=pieces,
        bounds=bounds if len(pieces) == len(lengths) else (0, bounds[-1]),
    )


def _bytes_of(piece: Tensor) -> Tensor:
    return piece.detach().cpu().contiguous().view(torch.uint8)
