"""Rows of different lengths in one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """``N`` rows, concatenated in one tensor.

    Row ``i`` has shape ``[lengths[i], *tail]``, or ``[]`` if the rows are scalars.

    Args:
        values: ``[sum(lengths), *tail]``, any dtype.
        lengths: ``[N]`` int64, on the CPU; all 1 for scalars.
        is_scalar: True if each row is a single number; then ``values`` is ``[N]``.

    Raises:
        ValueError: If the shapes do not match.
    """

    values: Tensor
    lengths: Tensor
    is_scalar: bool = False

    def __post_init__(self) -> None:
        if self.values.dim() == 0:
            raise ValueError("values has no dimension; expected [sum(lengths), *tail]")
        if self.lengths.dtype != torch.int64 or self.lengths.dim() != 1:
            raise ValueError(
                f"lengths is {self.lengths.dtype} of {self.lengths.dim()} dimensions; "
                "expected int64 of one dimension"
            )
        total = int(self.lengths.sum())
        if total != len(self.values):
            raise ValueError(f"lengths sum to {total}, but values has {len(self.values)} rows")
        if self.is_scalar and (self.values.dim() != 1 or len(self.lengths) != total):
            raise ValueError("scalar rows need values of one dimension and lengths of all 1")

    @classmethod
    def from_list(cls, rows: Sequence[Tensor]) -> "Jagged":
        """Copies rows into one tensor.

        Args:
            rows: At least one tensor; all of one dtype, number of dimensions and tail shape.

        Raises:
            ValueError: If the rows differ in these or there are none.
        """
        if not rows:
            raise ValueError("expected at least one row, got none; the dtype would be unknown")
        if problem := rows_problem(rows):
            raise ValueError(f"got {problem}")
        if rows[0].dim() == 0:
            unit_lengths = torch.ones(len(rows), dtype=torch.int64)
            return cls(torch.stack(list(rows)), unit_lengths, is_scalar=True)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.cat(list(rows)), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def offsets(self) -> Tensor:
        """Returns ``[N + 1]`` int64: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
        offsets = torch.zeros(len(self.lengths) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths, dim=0, out=offsets[1:])
        return offsets

    def unbind(self) -> list[Tensor]:
        if self.is_scalar:
            return list(self.values.unbind())
        return list(self.values.split(self.lengths.tolist()))

    def select(self, indices: Sequence[int] | Tensor) -> "Jagged":
        """Copies some rows, in the given order."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        starts = self.offsets()[:-1][rows]
        ends = torch.cumsum(lengths, dim=0)
        positions = torch.arange(int(lengths.sum()), dtype=torch.int64)
        positions += torch.repeat_interleave(starts - (ends - lengths), lengths)
        return Jagged(self.values[positions], lengths, is_scalar=self.is_scalar)


def rows_problem(rows: Sequence[Tensor]) -> str:
    """Returns why rows cannot be concatenated; empty if they can."""
    agree = len({row.dtype for row in rows}) == len(set(map(Tensor.dim, rows))) == 1
    if agree and (rows[0].dim() < 2 or len({row.shape[1:] for row in rows}) == 1):
        return ""
    kinds = dict.fromkeys(f"{row.dtype} {[*['*'][: row.dim()], *row.shape[1:]]}" for row in rows)
    return f"rows of {', '.join([*kinds][:5])}; dtypes and all but the first dimension must agree"
