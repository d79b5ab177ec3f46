"""Tests that messages over a Unix socket arrive whole, in order and within limits."""

import asyncio
import socket
import struct

from services.wire.data.channels.arena_socket import LocalChannel
from services.wire.data.encoding.codec import MAX_HEADER_BYTES


class End:
    """One end of a connection, with the received messages."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.channel = LocalChannel(
            lambda frames: self.messages.put_nowait([bytes(frame) for frame in frames]),
            self.ended.set_result,
        )

    async def attach(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=peer)


async def connected() -> tuple[End, End]:
    ends = End(), End()
    for end, peer in zip(ends, socket.socketpair(), strict=True):
        await end.attach(peer)
    return ends


async def test_messages_arrive_whole_and_in_order() -> None:
    sender, receiver = await connected()
    payload = bytes(range(256)) * 8192
    messages = [[b"first"], [b"second", b""], [b"third", payload[:3], payload[3:]]]
    for frames in messages:
        sender.channel.send(frames)
    heard = [await receiver.messages.get() for _ in messages]
    assert heard == [[b"first"], [b"second", b""], [b"third", payload]]
    sender.channel.close()
    assert await receiver.ended is False
    receiver.channel.close()


async def test_a_message_cut_anywhere_waits_for_its_rest() -> None:
    near_end, far_end = socket.socketpair()
    receiver = End()
    await receiver.attach(far_end)
    data = struct.pack("<Iq", 6, 4) + b"headerdata"
    for index in range(len(data)):
        assert receiver.messages.empty()
        near_end.send(data[index : index + 1])
        await asyncio.sleep(0)
    assert await receiver.messages.get() == [b"header", b"data"]
    near_end.close()
    assert await receiver.ended is False


async def test_lengths_above_the_limits_end_the_connection_before_anything_is_allocated() -> None:
    for header_size, payload_size in ((MAX_HEADER_BYTES + 1, -1), (8, 1 << 62), (8, -2)):
        near_end, far_end = socket.socketpair()
        receiver = End()
        await receiver.attach(far_end)
        near_end.send(struct.pack("<Iq", header_size, payload_size) + b"rest")
        assert await receiver.ended is True
        assert receiver.messages.empty()
        near_end.close()
