"""Messages of the data sockets.

A message is a header frame, then payload frames. The header is one byte of protocol version and a
msgpack array ``[op, request_id, *fields]``. Nothing else is ever decoded, and nothing is pickled::

    Reserve  -> Granted       space for blobs; waits while there is none
    Describe -> nothing       content of the put; parsed while the bytes are still arriving
    Write    -> nothing       one payload frame: a part of a reserved blob
    Commit   -> Committed     the blobs are complete; the samples become visible
    Abort    -> Committed     frees reserved space
    Store    -> Stored        a small put in one message: space, one payload frame, commit
    Read     -> Data..., Located  bytes of blobs, one payload frame each, or their arena positions
    Unpin    -> nothing       the reader has copied the ranges of Located
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, get_args, get_type_hints

import msgpack
import xxhash

from services.common.errors import InvalidArgumentError


def parts_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and size of each part of a blob."""
    for begin in range(0, size_bytes, FRAME_BYTES):
        yield begin, min(FRAME_BYTES, size_bytes - begin)


def combine(sums: Sequence[int]) -> int:
    """Returns the checksum of a blob whose parts have these checksums."""
    return sums[0] if len(sums) == 1 else checksum(struct.pack(f"<{len(sums)}Q", *sums))


def blob_checksum(data: bytes | bytearray | memoryview) -> int:
    """Returns the checksum of a blob: 64-bit XXH3 of its only part, or of the checksums of its parts."""
    view = memoryview(data)
    return combine([checksum(view[begin : begin + size]) for begin, size in parts_of(len(view))])


VERSION: Final = 4
FRAME_BYTES: Final = 1 << 20
"""Size of a blob's part, which is the content of one frame; only the last part of a blob may be
smaller. More frames cost more calls, larger ones page faults.
"""
MAX_HEADER_BYTES: Final = 16 << 20
"""Max bytes of a header; the description of 100,000 samples takes about 10 MiB."""
MAX_READ_BYTES: Final = 8 << 20
"""Max bytes of one Read."""
STORE_BYTES: Final = 256 << 10
"""Max size of a put in one message."""
MAX_BLOBS: Final = 256
"""Max blobs of one put."""
MAX_RANGES: Final = 65_536
"""Max ranges of one read."""
GRANT_S: Final = 120.0
"""Seconds after which space that was neither committed nor aborted is freed."""
PIN_S: Final = 60.0
"""Max seconds that a reader of the arena may pin its ranges."""
ALIGNMENT: Final = 64
"""Blobs begin at multiples of this so that any dtype can be viewed in place."""

ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Size of one element by dtype."""

_MAX_INT: Final = 1 << 63


def check_dtype(name: str, dtype: str) -> None:
    """Raises InvalidArgumentError if the transferqueue cannot store a field of this dtype."""
    if dtype not in ITEM_BYTES:
        raise InvalidArgumentError(
            f"field {name!r} has unsupported dtype {dtype}; use one of {', '.join(ITEM_BYTES)}",
            field=name,
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _is_hash(value: object) -> bool:
    return type(value) is int and 0 <= value < 2 * _MAX_INT


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= 4096


def _is_wait(value: object) -> bool:
    return type(value) is float and 0 <= value <= 86_400


def _is_bytes(value: object) -> bool:
    return type(value) is bytes


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_counts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_count, value))


def _is_hashes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_BLOBS and all(map(_is_hash, value))


def _is_sizes(value: object) -> bool:
    return _is_counts(value) and isinstance(value, tuple) and 0 < len(value) <= MAX_BLOBS


def _is_ranges(value: object) -> bool:
    return _is_counts(value) and isinstance(value, tuple) and len(value) % 3 == 0


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value)) and len(value) % 2 == 0


# Types of message fields, each with the check that decoding applies.
Count = Annotated[int, _is_count]
Counts = Annotated[tuple[int, ...], _is_counts]
Hash = Annotated[int, _is_hash]
Hashes = Annotated[tuple[int, ...], _is_hashes]
Sizes = Annotated[tuple[int, ...], _is_sizes]
Ranges = Annotated[tuple[int, ...], _is_ranges]
Text = Annotated[str, _is_text]
Texts = Annotated[tuple[str, ...], _is_texts]
Bytes = Annotated[bytes, _is_bytes]
Flag = Annotated[bool, _is_flag]
Wait = Annotated[float, _is_wait]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Requests space for the blobs of a put."""

    put_id: Text
    partition_id: Text
    sizes: Sizes
    wait_s: Wait


@dataclass(frozen=True, slots=True)
class Write:
    """Carries one frame of a reserved blob."""

    blob_id: Count
    offset: Count


@dataclass(frozen=True, slots=True)
class Describe:
    """Describes a put: ``meta`` is a serialized ``KVBatchMeta`` that numbers its blobs from 0."""

    put_id: Text
    meta: Bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """Completes a put: its blobs are fully written and have these checksums."""

    put_id: Text
    checksums: Hashes


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a put."""

    put_id: Text


@dataclass(frozen=True, slots=True)
class Store:
    """Puts at most STORE_BYTES in one message, with all blobs concatenated in one payload frame."""

    put_id: Text
    partition_id: Text
    sizes: Sizes
    wait_s: Wait
    meta: Bytes
    checksums: Hashes


@dataclass(frozen=True, slots=True)
class Read:
    """Requests bytes of blobs; ``ranges`` is ``blob_id, offset, size, blob_id, offset, size...``."""

    ranges: Ranges
    in_arena: Flag
    with_checksum: Flag = True
    """Requests a checksum in Data. Readers of whole blobs already know the blobs' checksums."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Releases the pin of a ``Located`` or ``Data``."""

    pin_id: Count


@dataclass(frozen=True, slots=True)
class Granted:
    """Answers Reserve: ids of the new blobs and their positions in the arena."""

    blob_ids: Counts
    positions: Counts


@dataclass(frozen=True, slots=True)
class Committed:
    """Answers Commit and Abort."""

    revision: Count


@dataclass(frozen=True, slots=True)
class Stored:
    """Answers Store."""

    blob_ids: Counts
    revision: Count


@dataclass(frozen=True, slots=True)
class Located:
    """Answers Read in the arena: the position of each range, pinned until Unpin.

    Without positions, some of the ranges are not in the arena; read them as frames.
    """

    pin_id: Count
    positions: Counts


@dataclass(frozen=True, slots=True)
class Data:
    """Answers Read, once per payload frame: the ranges, one after the other.

    The frames are sent directly from the blobs' memory, which stays pinned until Unpin; ``pin_id``
    0 needs no Unpin.
    """

    pin_id: Count
    is_last: Flag
    checksum: Hash
    """Checksum of all frames, set on the last one; 0 if none was requested."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Answers any failed request; ``details`` is ``name, value, name, value...``."""

    reason: Text
    message: Text
    details: Texts


Request = Reserve | Describe | Write | Commit | Abort | Store | Read | Unpin
Response = Granted | Committed | Stored | Located | Data | Failed
Message = Request | Response

_TYPES: Final[tuple[type[Message], ...]] = get_args(Message)
_OPS: Final = {cls: op for op, cls in enumerate(_TYPES, start=1)}
_FIELDS: Final = {
    cls: tuple(
        (name, kind.__metadata__[0])
        for name, kind in get_type_hints(cls, include_extras=True).items()
    )
    for cls in _TYPES
}
"""Fields of each message in order, with the check of each."""


def encode(message: Message, request_id: int) -> bytes:
    cls = type(message)
    fields = [_OPS[cls], request_id, *(getattr(message, name) for name, _ in _FIELDS[cls])]
    packed: bytes = msgpack.packb(fields)
    return bytes((VERSION,)) + packed


def decode(header: bytes | memoryview) -> tuple[Message, int]:
    """Decodes a header frame.

    Returns:
        The message and its request id.

    Raises:
        ValueError: If it is not exactly one well-formed message within the limits.
    """
    if not 2 <= len(header) <= MAX_HEADER_BYTES or header[0] != VERSION:
        raise ValueError(
            f"a header must have version {VERSION} and at most {MAX_HEADER_BYTES} bytes"
        )
    try:
        unpacked = msgpack.unpackb(
            memoryview(header)[1:], max_array_len=3 * MAX_RANGES, max_map_len=0, max_ext_len=0
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"the header is not msgpack within the limits: {error}") from error
    if not isinstance(unpacked, list) or len(unpacked) < 2:
        raise ValueError("a header must be an array of op, request id and fields")
    op, request_id, *fields = unpacked
    if not _is_count(op) or not 1 <= op <= len(_TYPES) or not _is_count(request_id):
        raise ValueError("a header must start with a known op and a request id")
    return _build(_TYPES[op - 1], fields), request_id


def aligned(size_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to the alignment; at least one unit."""
    return max(-(-size_bytes // ALIGNMENT), 1) * ALIGNMENT


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Returns the 64-bit XXH3 of ``data``."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


def checksum_of(frames: Iterable[bytes | memoryview]) -> int:
    """Returns the 64-bit XXH3 of concatenated frames."""
    state = xxhash.xxh3_64()
    for frame in frames:
        state.update(frame)
    digest: int = state.intdigest()
    return digest


def _build(cls: type[Message], fields: list[object]) -> Message:
    checks = _FIELDS[cls]
    if len(fields) != len(checks):
        raise ValueError(f"{cls.__name__} must have {len(checks)} fields, got {len(fields)}")
    values: list[object] = []
    for (name, is_valid), value in zip(checks, fields, strict=True):
        frozen = tuple(value) if isinstance(value, list) else value
        if not is_valid(frozen):
            raise ValueError(f"{cls.__name__}.{name} has the wrong type or is out of range")
        values.append(frozen)
    return cls(*values)  # type: ignore[arg-type]  # each value was checked for its field
