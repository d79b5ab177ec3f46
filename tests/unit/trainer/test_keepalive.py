"""Tests of TCP keepalive, which ends connections to silent hosts."""

import socket

import pytest

from services.trainer.ranks.command_group import SILENCE_S, watch_connections


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_of_other_libraries_end_when_their_peer_is_silent(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as connection,
    ):
        watch_connections()
        keeps = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        limit_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert (keeps, limit_ms) == (1, SILENCE_S * 1000)
        accepted, _ = listener.accept()
        with accepted:  # the same connection still transfers data
            connection.sendall(b"data")
            assert accepted.recv(4) == b"data"


def test_other_sockets_stay_as_they_are():
    near_end, far_end = socket.socketpair()
    with near_end, far_end, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        watch_connections()
        for connection in (near_end, datagrams):
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
