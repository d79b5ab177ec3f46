"""The GPU kernel of :mod:`services.common.weightsync.checksum`: both sums in one pass over the bytes."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def weighted_sums(words, sums, num_rows, block_rows: tl.constexpr, row_words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Add one block's share to ``sums``: ``[2]`` int64, by row factors and by column factors.

    Integer sums modulo 2**64 are the same in any order, so atomic additions change nothing.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]
    column = tl.arange(0, row_words)[None, :]
    place = row.to(tl.int64) * row_words + column
    values = tl.load(words + place, mask=(row < num_rows) & (column < row_words), other=0)
    by_row = values * (2 * row.to(tl.int64) + 1)
    by_column = values * (2 * column.to(tl.int64) + 1)
    tl.atomic_add(sums, tl.sum(tl.sum(by_row, axis=1), axis=0))
    tl.atomic_add(sums + 1, tl.sum(tl.sum(by_column, axis=1), axis=0))
