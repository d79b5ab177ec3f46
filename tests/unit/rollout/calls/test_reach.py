"""Tests that reward services must be public or allowed, and that connections use the checked address."""

import asyncio
import gzip

import httpx
import pytest

from services.extras.reward_services.remote import HttpRewardService
from services.rollout.calls.outside import AddressPolicy, is_public
from services.rollout.failures import BusyError, CallError
from services.rollout.rewards.base import RewardInput

GIVEN = RewardInput(prompt="p", response="r", answer="a", row={})
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.7",
    "203.0.113.9", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1",
    "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2001:db8::1", "100::1", "168.63.129.16", "192.0.0.192", "192.0.0.170", "100.100.100.200",
    "192.88.99.1", "192.80.8.124", "fec0::1", "feff::1", "fd20:ce::254", "5f00::1", "3fff::1", "4000::1",
    "2001:0:808:808::1", "::8.8.8.8", "::ffff:168.63.129.16", "::ffff:0:808:808", "2002:a83f:8110::1",
    "64:ff9b::a83f:8110", "64:ff9b:1::808:808", "64:ff9b::c000:c0", "2606:4700::5efe:a00:1",
    "2606:4700::200:5efe:7f00:1", "ff0e::1",
]  # fmt: skip
PUBLIC = [
    "8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808",
    "2002:808:808::1", "2a00:1450::1", "168.63.129.17", "192.0.1.1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_the_inside_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "::1"]
)
async def test_a_host_of_the_inside_is_rejected_however_it_is_written(host):
    with pytest.raises((CallError, BusyError)) as error:
        await AddressPolicy().resolve(host, 80)
    assert isinstance(error.value, BusyError) or "reward_hosts" in error.value.message


async def test_a_host_that_is_named_may_be_inside():
    assert await AddressPolicy({"localhost"}).resolve("LOCALHOST", 80) in ("127.0.0.1", "::1")


async def test_one_private_address_among_public_ones_is_enough(monkeypatch):
    async def both(*arguments, **options):
        return [(2, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    with pytest.raises(CallError, match=r"10\.0\.0\.1"):
        await AddressPolicy().resolve("rebinding.example", 80)


async def test_the_request_goes_to_the_address_that_was_checked_and_names_the_host(monkeypatch):
    async def public(*arguments, **options):
        return [(2, 1, 6, "", ("8.8.8.8", 8080))]

    def handler(request):
        requests.append(request)
        return httpx.Response(200, json={"score": 1})

    requests: list[httpx.Request] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", public)
    transport = httpx.MockTransport(handler)
    service = HttpRewardService(
        "https://judge.example:8080/s", reach=AddressPolicy(), transport=transport
    )
    assert await service.request_score(GIVEN, None) == 1
    (request,) = requests
    assert (request.url.host, request.headers["Host"]) == ("8.8.8.8", "judge.example:8080")
    assert request.extensions["sni_hostname"] == "judge.example"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(status):
    def handler(request):
        return httpx.Response(status, headers={"Location": "http://169.254.169.254/"})

    transport = httpx.MockTransport(handler)
    service = HttpRewardService(
        "http://127.0.0.1:1/", reach=AddressPolicy({"127.0.0.1"}), transport=transport
    )
    with pytest.raises(CallError, match=str(status)):
        await service.request_score(GIVEN, None)


async def test_a_huge_answer_is_not_read():
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"x" * (2 << 20)))
    service = HttpRewardService(
        "http://127.0.0.1:1/", reach=AddressPolicy({"127.0.0.1"}), transport=transport
    )
    with pytest.raises(CallError, match="more than"):
        await service.request_score(GIVEN, None)


class Bytes(httpx.AsyncByteStream):
    """Response body that counts the chunks read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.num_read = content, 0

    async def __aiter__(self):
        for begin in range(0, len(self.content), 1024):
            self.num_read += 1
            yield self.content[begin : begin + 1024]


@pytest.mark.parametrize(
    "encoding", ["gzip", "gzip, gzip", "deflate", "br", "zstd", "x-gzip", "\tGZIP"]
)
async def test_nothing_is_decompressed(encoding):
    async def send(request):
        assert request.headers["Accept-Encoding"] == "identity"
        return httpx.Response(200, headers={"Content-Encoding": encoding}, stream=stream)

    content = gzip.compress(gzip.compress(b'{"score": ' + b" " * (8 << 20) + b"1}"))
    stream = Bytes(content)
    service = HttpRewardService(
        "http://127.0.0.1:1/",
        reach=AddressPolicy({"127.0.0.1"}),
        transport=httpx.MockTransport(send),
    )
    with pytest.raises(CallError) as caught:
        await service.request_score(GIVEN, None)
    assert (caught.value.kind, stream.num_read) == ("invalid_value", 0)


async def test_identity_content_encoding_is_accepted():
    def send(_):
        return httpx.Response(200, headers={"Content-Encoding": "identity"}, json={"score": 1})

    service = HttpRewardService(
        "http://127.0.0.1:1/",
        reach=AddressPolicy({"127.0.0.1"}),
        transport=httpx.MockTransport(send),
    )
    assert await service.request_score(GIVEN, None) == 1


async def test_an_address_that_changes_is_checked_at_each_request(monkeypatch):
    async def found(*arguments, **options):
        return [(2, 1, 6, "", (addresses.pop(0), 80))]

    addresses = ["8.8.8.8", "169.254.169.254"]
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"score": 1}))
    service = HttpRewardService(
        "http://rebinding.example/", reach=AddressPolicy(), transport=transport
    )
    assert await service.request_score(GIVEN, None) == 1
    with pytest.raises(CallError, match="not public"):
        await service.request_score(GIVEN, None)
