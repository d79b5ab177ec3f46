"""Tests that Unix sockets of killed shards are removed."""

import os
import socket

from services.wire.data.channels.arena_socket import serve_arena

LONG_AGO = (0, 0)


async def test_stale_sockets_are_removed_at_the_next_start(tmp_path):
    def bound(name: str) -> socket.socket:
        bound_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound_socket.bind(str(tmp_path / name))
        return bound_socket

    dead, new, living = (bound(f"slipstream-{name}.sock") for name in ("dead", "new", "living"))
    other = bound("other.sock")
    living.listen()
    for name in ("slipstream-dead", "slipstream-living", "other"):
        os.utime(tmp_path / f"{name}.sock", LONG_AGO)
    (tmp_path / "slipstream-file.sock").touch()
    os.utime(tmp_path / "slipstream-file.sock", LONG_AGO)
    for closed in (dead, new, other):
        closed.close()
    own_socket = tmp_path / "slipstream-own.sock"
    with serve_arena(own_socket, instance_id="own", fd=0, accept_client=lambda peer: None):
        names = sorted(path.stem for path in tmp_path.iterdir())
    assert names == ["other", *(f"slipstream-{name}" for name in ("file", "living", "new", "own"))]
    assert not own_socket.exists()
    living.close()
