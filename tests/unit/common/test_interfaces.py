"""The network interface of an address, as Gloo and NCCL take it."""

import socket

import psutil

from services.common.host import interface_of, ip_of


def test_the_interface_of_an_address_is_the_one_that_has_it():
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_of(entry.address) == name
    loopback = interface_of("127.0.0.1")
    assert loopback in psutil.net_if_addrs()
    assert interface_of("127.0.0.12") == loopback
    assert interface_of("192.0.2.1") == ""
    assert interface_of("") == ""


def test_a_host_name_has_the_address_to_which_it_resolves():
    assert ip_of("localhost") == "127.0.0.1"
    assert ip_of("10.0.0.7") == "10.0.0.7"
    assert ip_of("[::1]") == "::1"
    assert ip_of("no-such-host.invalid") == ""
