"""128-bit checksums of buckets that detect every changed and every misplaced word.

On a CPU the checksum is XXH3. On a GPU a bucket's 64-bit words form a matrix with 1024 columns, and
the checksum is two sums modulo 2**64: of each word times the odd factor ``2 * row + 1``, and of
each word times ``2 * column + 1``. A changed word changes both sums; two exchanged words change at
least one. One kernel reads the bytes once. All members of a transfer keep its buffers on the same
kind of device, so they compute the same checksum.
"""

from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor

WORDS_PER_ROW = 1024
_ROW_BYTES = 8 * WORDS_PER_ROW
_WARPS = 8
_STAGES = 3
# Max. multiprocessors for a checksum during a transfer and decoding: more would delay the
# transfer's own kernels, fewer could not keep up with the wire.
_BLOCKS_BESIDE = 8


def write_checksum(bucket: Tensor, sums: Tensor, *, alone: bool = False) -> None:
    """Computes the checksum of a bucket.

    Args:
        bucket: ``[n]`` uint8; ``n`` is a multiple of 8 KiB.
        sums: ``[2]`` int64 zeros; receives the checksum.
        alone: True if nothing else runs on the GPU, so that the kernel may use all of it.
    """
    if not bucket.is_cuda:
        digest = xxhash.xxh3_128_digest(bucket.numpy().data)
        sums.copy_(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        return
    words = bucket.view(torch.int64).view(-1, WORDS_PER_ROW)
    block_rows = _block_rows(bucket.device)
    most = torch.cuda.get_device_properties(bucket.device).multi_processor_count
    blocks = -(-words.shape[0] // block_rows)
    _weighted_sums()[(min(blocks, most if alone else _BLOCKS_BESIDE),)](
        words,
        sums,
        words.shape[0],
        block_rows=block_rows,
        row_words=WORDS_PER_ROW,
        stages=_STAGES,
        num_warps=_WARPS,
    )


@cache
def _block_rows(device: torch.device) -> int:
    """Returns the rows that a block sums at once: as many as shared memory holds in all stages."""
    properties: Any = torch.cuda.get_device_properties(device)
    # The rest is for the final reduction.
    fitting = (properties.shared_memory_per_block_optin - _ROW_BYTES) // (_STAGES * _ROW_BYTES)
    return 1 << (int(fitting).bit_length() - 1)


@cache
def _weighted_sums() -> Any:
    """Returns the GPU kernel; imported at first use, as only torch's GPU builds contain Triton."""
    from services.weightsync.checksum_kernel import weighted_sums

    return weighted_sums
