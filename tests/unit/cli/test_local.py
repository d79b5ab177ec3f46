"""Addresses of the services that a command starts on this machine."""

import socket

import pytest

from services.cli import local
from services.common import host


def test_a_service_gets_a_free_port_below_the_ephemeral_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, _, port = local.free_address().rpartition(":")
    assert (name, int(port) in range(10_000, 20_000)) == ("127.0.0.1", True)
    monkeypatch.setattr(local, "_PORTS", range(int(port), int(port) + 1))
    monkeypatch.setattr(host, "_PORTS_TRIED", 1)
    with socket.create_server((name, int(port))):
        assert local.free_address() == "127.0.0.1:0"
    assert local.free_address() == f"127.0.0.1:{port}"
