"""Conversion of tensors to bytes and back, for every dtype and shape of samples."""

import pytest
import torch
from torch import Tensor

from services.common.errors import InvalidArgumentError
from services.wire.data.encoding.codec import FRAME_BYTES, ITEM_BYTES
from services.wire.data.encoding.packing import (
    PackedColumn,
    Values,
    pack,
    select_rows,
    share,
    unpack,
)
from services.wire.data.jagged import Jagged

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def there_and_back(values: Values) -> Jagged:
    column = pack("x", values)
    return unpack(column.to_field(0), data_of(column))


def data_of(column: PackedColumn) -> Tensor:
    joined = column.joined()
    data = torch.empty(column.size_bytes, dtype=torch.uint8)
    for part in column.parts():
        part.copy_into(data[part.begin : part.begin + part.size])
    assert bytes(joined) == bytes(data.numpy().data)
    return data


def same(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2), (0, 2)], ids=str)
def test_rows_of_every_dtype_and_shape_round_trip(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    row = torch.arange(8).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    rows = [row.to(torch.float32).to(dtype), (row + 1).to(torch.float32).to(dtype)]
    assert all(map(same, there_and_back(rows).unbind(), rows))


def test_an_empty_row_may_have_any_stride() -> None:
    (row,) = there_and_back([torch.empty(0, dtype=torch.int32).as_strided((0,), (0,))]).unbind()
    assert (row.shape, row.dtype) == ((0,), torch.int32)


def test_rows_of_different_lengths_round_trip_from_lists_and_jagged() -> None:
    rows = [torch.arange(n, dtype=torch.int64) for n in (3, 0, 5)]
    for values in (rows, Jagged.from_list(rows)):
        assert all(map(same, there_and_back(values).unbind(), rows))


def test_a_tensor_holds_one_sample_per_row() -> None:
    dense = torch.randn(3, 4, 2)
    assert all(map(same, there_and_back(dense).unbind(), dense.unbind()))
    scalars = there_and_back(torch.tensor([1.0, 2.0]))
    assert scalars.is_scalar


def test_views_and_tensors_with_gradients_are_copied_as_they_look() -> None:
    base = torch.randn(4, 6, requires_grad=True)
    rows = [base[:, 0], base[1, ::2], base[2]]
    assert all(map(same, there_and_back(rows).unbind(), [row.detach() for row in rows]))


def test_a_shared_row_is_stored_once() -> None:
    column = share("prompt", torch.tensor([1, 2, 3], dtype=torch.int32), 4)
    assert column.size_bytes == 12
    assert column.lengths == (3,) * 4
    assert column.offsets == (0,) * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], "must agree"),
        ([torch.zeros(2), torch.zeros(2, 2)], "must agree"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "must agree"),
        ([torch.zeros(2), "text"], "str"),
        ([], "none"),
        ([torch.zeros(2, dtype=torch.complex64)], "dtype complex64"),
    ],
)
def test_unsupported_values_are_rejected(values: Values, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        pack("x", values)


def test_rows_can_be_selected_before_packing() -> None:
    rows = [torch.arange(n) for n in (1, 2, 3)]
    for values in (rows, Jagged.from_list(rows)):
        chosen = there_and_back(select_rows(values, [2, 0]))
        assert all(map(same, chosen.unbind(), [rows[2], rows[0]]))


def test_pieces_that_cross_the_end_of_a_part_are_cut() -> None:
    rows = [torch.randn(n) for n in (1, 0, FRAME_BYTES // 4 - 1, 0, FRAME_BYTES // 2, 7, 0)]
    column = pack("x", rows)
    assert [part.size for part in column.parts()] == [FRAME_BYTES] * 3 + [28]
    assert [part.in_place() is None for part in column.parts()] == [True, False, False, False]
    assert data_of(column).view(torch.float32).equal(torch.cat(rows))
