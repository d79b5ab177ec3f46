"""128-bit checksums of buckets and tensors that detect every changed and every misplaced word.

On a CPU the checksum is XXH3. On a GPU the words form a matrix with 1024 columns, and the checksum is
two sums modulo 2**64: of each word times the odd factor ``2 * row + 1``, and of each word times
``2 * column + 1``. Words of a bucket have 64 bits, and those of a tensor are its elements. A changed
word changes both sums; two exchanged words change at least one. One kernel reads the bytes once. All
members of a transfer keep its buffers on the same kind of device, so they compute the same checksum.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor

WORDS_PER_ROW = 1024
_ROW_BYTES = 8 * WORDS_PER_ROW
_WARPS = 8
_STAGES = 3
# Max multiprocessors for a checksum during a transfer and decoding: more would delay the
# transfer's own kernels, fewer could not keep up with the wire.
_BLOCKS_BESIDE = 8
# Rows of a tensor that a block sums at once; their sums fit into registers.
_TENSOR_BLOCK_ROWS = 4


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
    max_blocks = torch.cuda.get_device_properties(bucket.device).multi_processor_count
    blocks = -(-words.shape[0] // block_rows)
    _kernels().weighted_sums[(min(blocks, max_blocks if alone else _BLOCKS_BESIDE),)](
        words,
        sums,
        words.shape[0],
        block_rows=block_rows,
        row_words=WORDS_PER_ROW,
        stages=_STAGES,
        num_warps=_WARPS,
    )


def write_tensor_checksums(tensors: Sequence[Tensor], sums: Tensor) -> None:
    """Computes the checksum of each tensor; on a GPU without waiting, with one kernel for each element size.

    Args:
        tensors: ``[n]`` tensors of one device, of any shape and dtype.
        sums: ``[n, 2]`` int64 zeros on that device; receives the checksums.
    """
    if not sums.is_cuda:
        for tensor, total in zip(tensors, sums, strict=True):
            write_checksum(tensor.contiguous().view(-1).view(torch.uint8), total)
        return
    # ``contiguous`` copies tensors with gaps; the copies must outlive the start of the kernel.
    contiguous = [tensor.contiguous() for tensor in tensors]
    sizes: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(contiguous):
        entry = (tensor.data_ptr(), tensor.numel(), index)
        sizes.setdefault(tensor.element_size(), []).append(entry)
    programs = torch.cuda.get_device_properties(sums.device).multi_processor_count
    for size, entries in sizes.items():
        # Pinned memory, because a copy from other memory waits for the GPU.
        table = torch.tensor(entries, dtype=torch.int64).pin_memory()
        _kernels().weighted_sums_of_tensors[(len(entries), programs)](
            table.to(sums.device, non_blocking=True),
            sums,
            word=_kernels().WORDS[size],
            block_rows=_TENSOR_BLOCK_ROWS,
            row_words=WORDS_PER_ROW,
            num_warps=_WARPS,
        )


@cache
def _block_rows(device: torch.device) -> int:
    """Returns how many rows a block sums at once: the largest power of two that fits into shared memory."""
    properties: Any = torch.cuda.get_device_properties(device)
    # Each stage holds a block's rows; one more row is reserved for the final reduction.
    fitting = (properties.shared_memory_per_block_optin - _ROW_BYTES) // (_STAGES * _ROW_BYTES)
    return 1 << (int(fitting).bit_length() - 1)


@cache
def _kernels() -> Any:
    """Returns the GPU kernels; imported at first use, as only torch's GPU builds contain Triton."""
    from services.weightsync import checksum_kernel

    return checksum_kernel
