"""Unix socket through which processes of the same host receive the arena and exchange messages.

The file's mode, 0600, decides who may connect.
"""

import asyncio
import mmap
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.host import short_path

_TIMEOUT_S = 2.0
_MAX_NAME_BYTES = 256
# A socket that is just being created does not listen yet either.
_NEW_S = 60.0


@contextmanager
def serve_arena(
    path: Path, *, instance_id: str, fd: int, welcome: Callable[[socket.socket], None]
) -> Iterator[None]:
    """Sends ``fd`` to each process that connects, until the block ends.

    Args:
        path: Path of the socket. Sockets that killed processes of this user left in its folder are
            removed.
        instance_id: Sent with ``fd``, so that a client detects a socket of another shard.
        fd: Descriptor of the arena.
        welcome: Takes over the connection.
    """
    path.unlink(missing_ok=True)
    for other in path.parent.glob(f"slipstream-*{path.suffix}"):
        if _is_left_behind(other):
            other.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    old_mask = os.umask(0o177)
    try:
        with short_path(path) as short:
            listener.bind(short)
    finally:
        os.umask(old_mask)
    listener.listen()

    def accept() -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            socket.send_fds(peer, [instance_id.encode()], [fd])
        except OSError:
            # The peer left; it will use the network or connect again.
            peer.close()
            return
        peer.setblocking(False)
        welcome(peer)

    loop.add_reader(listener, accept)
    try:
        yield
    finally:
        loop.remove_reader(listener)
        listener.close()
        path.unlink(missing_ok=True)


def open_arena(path: str, *, instance_id: str) -> tuple[mmap.mmap, socket.socket] | None:
    """Connects to a shard of this host.

    Returns:
        Its memory and the connection; None if the shard is on another host or refuses this user.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        peer.settimeout(_TIMEOUT_S)
        with short_path(Path(path)) as short:
            peer.connect(short)
        name, fds, _, _ = socket.recv_fds(peer, _MAX_NAME_BYTES, 1)
        if name.decode(errors="replace") == instance_id and len(fds) == 1:
            memory = mmap.mmap(fds[0], 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            peer.setblocking(False)
            return memory, peer
    except OSError:
        # Whatever the error, the network remains.
        pass
    finally:
        for fd in fds:
            os.close(fd)
    peer.close()
    return None


def _is_left_behind(path: Path) -> bool:
    """Returns whether this user owns the socket, nothing listens there, and it is not just being created."""
    try:
        found = path.lstat()
        is_own = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or time.time() - found.st_mtime < _NEW_S:
            return False
        with short_path(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_TIMEOUT_S)
            peer.connect(short)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
