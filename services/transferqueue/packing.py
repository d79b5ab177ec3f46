"""Tensors to columns of bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import msgpack
import torch
from torch import Tensor

from services.common.columns import FieldColumn
from services.common.errors import InvalidArgumentError
from services.common.jagged import Jagged
from services.transferqueue.codec import ITEM_BYTES

Values = Jagged | Tensor | Sequence[Tensor] | Sequence[object]
"""Values of one field: rows as ``Jagged``, a tensor whose first dimension counts the samples, a list
of tensors, or a list of values that msgpack can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedColumn:
    """Values of one field, ready to be sent."""

    name: str
    dtype: str
    row_rank: int
    tail_shape: tuple[int, ...]
    lengths: tuple[int, ...]
    """Length of each sample's first dimension."""
    offsets: tuple[int, ...]
    """Byte offset of each sample."""
    pieces: tuple[Tensor, ...]
    """The bytes in order: flat, contiguous tensors of one dtype on the CPU."""
    size_bytes: int

    def to_field(self, blob_index: int) -> FieldColumn:
        """The column's description once it is a blob."""
        return FieldColumn(
            name=self.name,
            dtype=self.dtype,
            row_rank=self.row_rank,
            tail_shape=self.tail_shape,
            lengths=self.lengths,
            blob_indexes=(blob_index,) * len(self.lengths),
            offsets=self.offsets,
        )

    def copy_into(self, target: Tensor) -> None:
        """Lay the bytes into ``target``, uint8 of ``size_bytes``."""
        if self.size_bytes == 0:
            return
        if len(self.pieces) == 1:
            target.copy_(self.pieces[0].view(torch.uint8))
            return
        torch.cat(self.pieces, out=target.view(self.pieces[0].dtype))


def pack(name: str, values: Values) -> PackedColumn:
    """Pack the values of one field, one row per key.

    Raises:
        InvalidArgumentError: If the dtype is not supported or the rows do not agree.
    """
    if isinstance(values, Tensor):
        values = Jagged.from_dense(values)
    if isinstance(values, Jagged):
        rank = 0 if values.is_scalar else values.values.dim()
        lengths = values.lengths.tolist()
        return _column(name, [values.values], lengths, rank, tuple(values.values.shape[1:]))
    rows = [row for row in values if isinstance(row, Tensor)]
    if len(rows) == len(values) and rows:
        return _pack_rows(name, rows)
    if rows:
        raise InvalidArgumentError(f"field {name!r} mixes tensors and other values")
    return _pack_objects(name, values)


def share(name: str, row: Tensor, num_keys: int) -> PackedColumn:
    """Pack one row that all keys share."""
    column = _pack_rows(name, [row])
    return PackedColumn(
        name=name,
        dtype=column.dtype,
        row_rank=column.row_rank,
        tail_shape=column.tail_shape,
        lengths=column.lengths * num_keys,
        offsets=column.offsets * num_keys,
        pieces=column.pieces,
        size_bytes=column.size_bytes,
    )


def select_rows(values: Values, indexes: Sequence[int]) -> Values:
    """Some rows of a field's values."""
    if isinstance(values, Jagged):
        return values.select(indexes)
    if isinstance(values, Tensor):
        return values[torch.tensor(indexes, dtype=torch.int64)]
    return [values[index] for index in indexes]


def unpack(column: FieldColumn, data: Tensor) -> Jagged:
    """View bytes as the rows that ``column`` describes.

    Args:
        column: Type and lengths.
        data: uint8, the rows one after the other, aligned for the dtype.
    """
    dtype = torch.uint8 if column.dtype == "msgpack" else getattr(torch, column.dtype)
    values = data.view(dtype)
    if column.tail_shape:
        values = values.view(sum(column.lengths), *column.tail_shape)
    lengths = torch.tensor(column.lengths, dtype=torch.int64)
    return Jagged(values, lengths, is_scalar=column.row_rank == 0)


def unpack_objects(column: FieldColumn, data: Tensor) -> list[object]:
    """Decode the values of a field that does not hold tensors."""
    view = data.numpy().data
    ends = list(accumulate(column.lengths))
    return [
        msgpack.unpackb(view[end - length : end])
        for end, length in zip(ends, column.lengths, strict=True)
    ]


def _pack_rows(name: str, rows: Sequence[Tensor]) -> PackedColumn:
    first = rows[0]
    rank, tail, dtype = first.dim(), first.shape[1:], first.dtype
    for index, row in enumerate(rows):
        if row.dtype != dtype or row.dim() != rank or row.shape[1:] != tail:
            raise InvalidArgumentError(
                f"field {name!r}: row {index} is {row.dtype} {tuple(row.shape)}, row 0 is {dtype} "
                f"{tuple(first.shape)}; only the first dimension may differ",
                field=name,
            )
    lengths = [1] * len(rows) if rank == 0 else [row.shape[0] for row in rows]
    return _column(name, rows, lengths, rank, tuple(tail))


def _pack_objects(name: str, values: Sequence[object]) -> PackedColumn:
    try:
        packed = [msgpack.packb(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"field {name!r} holds a value that msgpack cannot: {error}; use numbers, text, bytes, "
            "lists and dicts",
            field=name,
        ) from error
    data = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
    lengths = tuple(len(row) for row in packed)
    return PackedColumn(
        name=name,
        dtype="msgpack",
        row_rank=1,
        tail_shape=(),
        lengths=lengths,
        offsets=tuple(accumulate(lengths[:-1], initial=0)),
        pieces=(data,),
        size_bytes=len(data),
    )


def _column(
    name: str, tensors: Sequence[Tensor], lengths: list[int], rank: int, tail: tuple[int, ...]
) -> PackedColumn:
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise InvalidArgumentError(
            f"field {name!r} has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}", field=name
        )
    row_bytes = ITEM_BYTES[dtype] * prod(tail)
    is_one_byte = ITEM_BYTES[dtype] == 1
    pieces = tuple([_flat(tensor, as_bytes=is_one_byte) for tensor in tensors])
    offsets = list(accumulate([length * row_bytes for length in lengths], initial=0))
    return PackedColumn(
        name=name,
        dtype=dtype,
        row_rank=rank,
        tail_shape=tail,
        lengths=tuple(lengths),
        offsets=tuple(offsets[:-1]),
        pieces=pieces,
        size_bytes=offsets[-1],
    )


def _flat(tensor: Tensor, *, as_bytes: bool) -> Tensor:
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    if flat.requires_grad or flat.device.type != "cpu" or not flat.is_contiguous():
        flat = flat.detach().cpu().contiguous()
    # Not every operation exists for bool and the float8 types; all exist for bytes.
    return flat.view(torch.uint8) if as_bytes else flat
