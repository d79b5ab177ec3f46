"""GPU kernel of :mod:`services.weightsync.checksum`: both sums in one pass over the bytes."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def weighted_sums(  # type: ignore[no-untyped-def]  # noqa: ANN201
    words,  # noqa: ANN001
    sums,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    block_rows: tl.constexpr,
    row_words: tl.constexpr,
    stages: tl.constexpr,
):
    """Adds the part of one program to ``sums``: ``[2]`` int64, by row factors and by column factors.

    Each program processes every n-th block of rows and prefetches the next ones while it sums one.
    Threads synchronize only at the end. Integer sums modulo 2**64 do not depend on the order, so
    atomic additions are deterministic.
    """
    column = tl.arange(0, row_words)
    rows = tl.arange(0, block_rows)
    by_row = tl.zeros((block_rows, row_words), dtype=tl.int64)
    by_column = tl.zeros((block_rows, row_words), dtype=tl.int64)
    first = tl.program_id(0) * block_rows
    for start in tl.range(first, num_rows, tl.num_programs(0) * block_rows, num_stages=stages):
        row = (start + rows).to(tl.int64)
        places = row[:, None] * row_words + column[None, :]
        values = tl.load(words + places, mask=row[:, None] < num_rows, other=0)
        by_row += values * (2 * row + 1)[:, None]
        by_column += values
    column_factors = 2 * column.to(tl.int64) + 1
    tl.atomic_add(sums, tl.sum(tl.sum(by_row, axis=0), axis=0))
    tl.atomic_add(sums + 1, tl.sum(tl.sum(by_column, axis=0) * column_factors, axis=0))
