"""GPU kernels of :mod:`services.weightsync.checksum`: both sums in one pass over the bytes."""

import triton
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Type of a word by its size in bytes."""


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
        offsets = row[:, None] * row_words + column[None, :]
        values = tl.load(words + offsets, mask=row[:, None] < num_rows, other=0)
        by_row += values * (2 * row + 1)[:, None]
        by_column += values
    column_factors = 2 * column.to(tl.int64) + 1
    tl.atomic_add(sums, tl.sum(tl.sum(by_row, axis=0), axis=0))
    tl.atomic_add(sums + 1, tl.sum(tl.sum(by_column, axis=0) * column_factors, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def weighted_sums_of_tensors(  # type: ignore[no-untyped-def]  # noqa: ANN201
    table,  # noqa: ANN001
    sums,  # noqa: ANN001
    word: tl.constexpr,
    block_rows: tl.constexpr,
    row_words: tl.constexpr,
):
    """Adds the part of one program to the sums of one tensor, as :func:`weighted_sums` does.

    Program ``(n, p)`` processes the blocks ``p``, ``p + num_programs``, ... of entry ``n`` of the table.

    Args:
        table: ``[n, 3]`` int64: address, number of words and row of ``sums`` of each tensor.
        sums: ``[m, 2]`` int64.
        word: Integer type of the words of all tensors; words are sign-extended.
    """
    entry = table + 3 * tl.program_id(0)
    words = tl.load(entry).to(tl.pointer_type(word))
    num_words = tl.load(entry + 1)
    total = sums + 2 * tl.load(entry + 2)
    num_rows = tl.cdiv(num_words, row_words)
    first = tl.program_id(1) * block_rows
    if first < num_rows:
        column = tl.arange(0, row_words)
        rows = tl.arange(0, block_rows)
        by_row = tl.zeros((block_rows, row_words), dtype=tl.int64)
        by_column = tl.zeros((block_rows, row_words), dtype=tl.int64)
        for start in range(first, num_rows, tl.num_programs(1) * block_rows):
            row = (start + rows).to(tl.int64)
            offsets = row[:, None] * row_words + column[None, :]
            values = tl.load(words + offsets, mask=offsets < num_words, other=0).to(tl.int64)
            by_row += values * (2 * row + 1)[:, None]
            by_column += values
        column_factors = 2 * column.to(tl.int64) + 1
        tl.atomic_add(total, tl.sum(tl.sum(by_row, axis=0), axis=0))
        tl.atomic_add(total + 1, tl.sum(tl.sum(by_column, axis=0) * column_factors, axis=0))
