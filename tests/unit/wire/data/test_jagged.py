"""Tests of rows of different lengths in one tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.wire.data.jagged import Jagged


def rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(n) + 10 * n for n in lengths]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
def test_rows_can_be_selected_in_any_order(lengths: list[int], data: st.DataObject) -> None:
    source = rows(*lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    picked = Jagged.from_list(source).select(chosen).unbind()
    assert len(picked) == len(chosen)
    assert all(torch.equal(row, source[i]) for row, i in zip(picked, chosen, strict=True))


def test_offsets_are_the_starts_of_rows() -> None:
    assert Jagged.from_list(rows(1, 2, 3)).offsets().tolist() == [0, 1, 3, 6]


def test_scalars_round_trip() -> None:
    scalars = Jagged.from_list([torch.tensor(1.0), torch.tensor(2.0)])
    assert [row.dim() for row in scalars.unbind()] == [0, 0]
    assert scalars.is_scalar


def test_inconsistent_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Jagged.from_list([])
    with pytest.raises(ValueError, match="must agree"):
        Jagged.from_list([torch.zeros(1), torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="lengths"):
        Jagged(torch.zeros(2), torch.tensor([3]))
    with pytest.raises(ValueError, match="int64"):
        Jagged(torch.zeros(2), torch.tensor([2], dtype=torch.int32))
