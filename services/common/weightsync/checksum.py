"""Checksums of buckets that see every changed and every misplaced word.

A bucket's 64-bit words form a matrix with 1024 columns. Two sums are taken modulo 2**64: each word
times the odd factor ``2 * row + 1``, and each word times ``2 * column + 1``. A changed word changes
both; two words that changed places change at least one. On a GPU one kernel reads the bytes once; on a
CPU the row sums and column sums come first, so that nothing of the bucket's size is written.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

WORDS_PER_ROW = 1024
_BLOCK_ROWS = 4


def bucket_checksum(bucket: Tensor) -> Tensor:
    """Checksums of a bucket: ``[2]`` int64.

    Args:
        bucket: ``[n]`` uint8; ``n`` is a multiple of 8 KiB.
    """
    words = bucket.view(torch.int64).view(-1, WORDS_PER_ROW)
    if bucket.is_cuda:
        sums = torch.zeros(2, dtype=torch.int64, device=bucket.device)
        blocks = -(-words.shape[0] // _BLOCK_ROWS)
        _weighted_sums()[(blocks,)](
            words, sums, words.shape[0], block_rows=_BLOCK_ROWS, row_words=WORDS_PER_ROW
        )
        return sums
    rows = words.sum(1) @ _odd(words.shape[0])
    columns = words.sum(0) @ _odd(WORDS_PER_ROW)
    return torch.stack((rows, columns))


def _odd(count: int) -> Tensor:
    return torch.arange(count).mul_(2).add_(1)


@cache
def _weighted_sums() -> Any:
    """The GPU kernel. Triton comes with torch's GPU builds only, so it is imported at first use."""
    from services.common.weightsync.checksum_kernel import weighted_sums

    return weighted_sums
