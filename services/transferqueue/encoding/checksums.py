"""Checksums of blobs, made of the checksums of their parts.

A part is what one frame holds. Parts can be copied, hashed and sent by several threads, each while it is in
the cache.
"""

import struct
from collections.abc import Iterator, Sequence

from services.transferqueue.encoding.codec import FRAME_BYTES, checksum


def parts_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and size of each part of a blob."""
    for begin in range(0, size_bytes, FRAME_BYTES):
        yield begin, min(FRAME_BYTES, size_bytes - begin)


def combine(parts: Sequence[int]) -> int:
    """Checksum of a blob whose parts have these checksums."""
    return parts[0] if len(parts) == 1 else checksum(struct.pack(f"<{len(parts)}Q", *parts))


def blob_checksum(data: bytes | bytearray | memoryview) -> int:
    """Checksum of a blob: 64-bit XXH3 of its only part, or of the checksums of its parts."""
    view = memoryview(data)
    return combine([checksum(view[begin : begin + size]) for begin, size in parts_of(len(view))])
