"""Tests that frames of a read are copied to their positions and verified."""

import pytest

from services.common.errors import DataLossError
from services.wire.batch import BlobRef
from services.wire.data.encoding import codec
from services.wire.data.encoding.readplan import Extent
from services.wire.data.transport.socket_transport import Arrival

DATA = bytes(range(40))
BLOB = BlobRef(shard_id="s", blob_id=1, size_bytes=40, checksum=codec.checksum(DATA))
LAST = codec.Data(0, True, codec.checksum(DATA))


def arrival(target: bytearray, *, with_checksum: bool = False) -> Arrival:
    parts = [Extent(BLOB, 0, 25, 64), Extent(BLOB, 25, 15, 0)]
    return Arrival(parts, memoryview(target), with_checksum=with_checksum)


def frames(*sizes: int) -> list[memoryview]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [memoryview(DATA)[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("sizes", [(40,), (25, 15), (1, 30, 9), (10, 0, 10, 10, 10)])
def test_bytes_come_to_their_places_however_they_are_cut(sizes: tuple[int, ...]) -> None:
    target = bytearray(100)
    read = arrival(target, with_checksum=True)
    for frame in frames(*sizes):
        read.copy_frames([frame])
    assert read.digests(LAST) == [codec.checksum(DATA[:25]), codec.checksum(DATA[25:])]
    assert (target[64:89], target[:15]) == (DATA[:25], DATA[25:])
    assert not any(target[15:64]) and not any(target[89:])


@pytest.mark.parametrize(
    ("sizes", "answer"),
    [
        ((39,), LAST),
        ((), LAST),
        ((40,), codec.Data(0, True, LAST.checksum ^ 1)),
        ((40,), codec.Located(0, ())),
    ],
    ids=["too little", "nothing", "other bytes", "no data"],
)
def test_a_read_with_a_wrong_checksum_is_an_error(
    sizes: tuple[int, ...], answer: codec.Response
) -> None:
    read = arrival(bytearray(100), with_checksum=True)
    read.copy_frames(frames(*sizes))
    with pytest.raises(DataLossError):
        read.digests(answer)


def test_more_than_was_asked_for_is_an_error_and_harms_nothing() -> None:
    target = bytearray(100)
    read = arrival(target)
    read.copy_frames([*frames(40), memoryview(b"more")])
    with pytest.raises(DataLossError):
        read.digests(LAST)
    assert target[15:19] == bytes(4)
