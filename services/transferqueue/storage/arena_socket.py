"""Hands the arena of a shard to processes of the same host, over a unix socket.

Only the descriptor passes through the socket. Who may connect is decided by the file's mode, 0600.
"""

import asyncio
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TIMEOUT_S = 2.0
_MAX_NAME_BYTES = 256


@contextmanager
def serve_arena(path: Path, *, instance_id: str, fd: int) -> Iterator[None]:
    """Give ``fd`` to each process that connects, until the block ends.

    Args:
        path: Where the socket is; replaced if a dead process left it.
        instance_id: Sent along, so that a client notices a socket of another shard.
        fd: Descriptor of the arena.
    """
    path.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    old_mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(old_mask)
    listener.listen()

    def accept() -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        with peer:
            try:
                socket.send_fds(peer, [instance_id.encode()], [fd])
            except OSError:
                # The peer left; it will use the network or connect again.
                return

    loop.add_reader(listener, accept)
    try:
        yield
    finally:
        loop.remove_reader(listener)
        listener.close()
        path.unlink(missing_ok=True)


def map_arena(path: str, *, instance_id: str) -> mmap.mmap | None:
    """Map the arena of a shard of this host.

    Returns:
        The memory; None if the shard is on another host or does not let this user in.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_TIMEOUT_S)
            peer.connect(path)
            name, fds, _, _ = socket.recv_fds(peer, _MAX_NAME_BYTES, 1)
    except OSError:
        return None
    try:
        if name.decode(errors="replace") != instance_id or len(fds) != 1:
            return None
        return mmap.mmap(fds[0], 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        for fd in fds:
            os.close(fd)
