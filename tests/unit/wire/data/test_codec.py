"""Messages of the data sockets: exact round trips, and errors for invalid input."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.data.encoding import codec

COUNTS = st.integers(0, (1 << 63) - 1)
TEXT = st.text(max_size=20)
RANGES = st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=4).map(
    lambda rows: tuple(number for row in rows for number in row)
)
SIZES = st.lists(COUNTS, min_size=1, max_size=4).map(tuple)
HASHES = st.lists(st.integers(0, (1 << 64) - 1), max_size=4).map(tuple)
IDS = st.lists(COUNTS, max_size=4).map(tuple)
WAIT = st.floats(0, 86_400)
MESSAGES = st.one_of(
    st.builds(codec.Reserve, TEXT, TEXT, SIZES, WAIT),
    st.builds(codec.Write, COUNTS, COUNTS),
    st.builds(codec.Describe, TEXT, st.binary(max_size=20)),
    st.builds(codec.Commit, TEXT, HASHES),
    st.builds(codec.Abort, TEXT),
    st.builds(codec.Store, TEXT, TEXT, SIZES, WAIT, st.binary(max_size=20), HASHES),
    st.builds(codec.Read, RANGES, st.booleans()),
    st.builds(codec.Unpin, COUNTS),
    st.builds(codec.Granted, IDS, IDS),
    st.builds(codec.Committed, COUNTS),
    st.builds(codec.Stored, IDS, COUNTS),
    st.builds(codec.Located, COUNTS, IDS),
    st.builds(codec.Data, COUNTS, st.booleans(), st.integers(0, (1 << 64) - 1)),
    st.builds(codec.Failed, TEXT, TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=2).map(
        lambda pairs: tuple(text for pair in pairs for text in pair)
    )),
)  # fmt: skip


@given(message=MESSAGES, request_id=COUNTS)
def test_a_message_survives_the_wire(message: codec.Message, request_id: int) -> None:
    assert codec.decode(codec.encode(message, request_id)) == (message, request_id)


def decode_or_refuse(header: bytes) -> None:
    """Decodes a header; only ValueError is allowed as error, and decoded messages must round-trip."""
    try:
        message, request_id = codec.decode(header)
    except ValueError:
        return
    assert codec.decode(codec.encode(message, request_id)) == (message, request_id)


@given(header=st.binary(max_size=200))
def test_random_bytes_are_rejected_or_understood(header: bytes) -> None:
    decode_or_refuse(header)
    decode_or_refuse(bytes([codec.VERSION]) + header)


@given(message=MESSAGES, data=st.data())
def test_damaged_messages_are_rejected_or_understood(
    message: codec.Message, data: st.DataObject
) -> None:
    header = bytearray(codec.encode(message, 1))
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(header))
    decode_or_refuse(bytes(header[: data.draw(st.integers(0, len(header)))]))


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | TEXT
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=20,
)  # fmt: skip


@given(op=st.integers(0, 20), fields=st.lists(JSONISH, max_size=6))
def test_wrong_fields_are_rejected_or_understood(op: int, fields: list[object]) -> None:
    decode_or_refuse(bytes([codec.VERSION]) + msgpack.packb([op, 1, *fields]))


def test_an_announced_size_is_rejected_before_anything_is_allocated() -> None:
    array_of_4_billion = bytes([codec.VERSION, 0xDD, 0xFF, 0xFF, 0xFF, 0xFF])
    text_of_4_gigabytes = bytes([codec.VERSION, 0x93, 1, 1, 0xDB, 0xFF, 0xFF, 0xFF, 0xFF])
    for header in (array_of_4_billion, text_of_4_gigabytes):
        with pytest.raises(ValueError, match="msgpack"):
            codec.decode(header)


def test_another_protocol_version_is_rejected() -> None:
    header = bytearray(codec.encode(codec.Unpin(1), 1))
    header[0] = codec.VERSION + 1
    with pytest.raises(ValueError, match="version"):
        codec.decode(bytes(header))


def test_bytes_of_a_header_do_not_change_between_releases() -> None:
    header = codec.encode(codec.Reserve("put_1", "run_1/train", (64, 8), 0.5), 7)
    assert header.hex() == (
        "04960107a5" + b"put_1".hex() + "ab" + b"run_1/train".hex() + "924008cb3fe0000000000000"
    )
