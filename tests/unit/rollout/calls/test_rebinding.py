"""Tests that DNS rebinding fails: connections use the checked address if a name turns private later."""

import asyncio
import socket
from contextlib import suppress
from types import SimpleNamespace

import pytest

from services.extras.agents.runner import AgentService
from services.extras.environments.openenv import OpenEnv
from services.extras.reward_services.remote import GrpcRewardService, HttpRewardService
from services.rollout.calls import outside
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.data.images import ImageReader
from services.rollout.failures import BusyError, CallError, GroupError
from services.rollout.rewards.base import RewardInput

HOST = "rebinding.example"
PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"
GIVEN = RewardInput(prompt="p", response="r", answer="a", row={})


async def http_reward(port: int) -> None:
    service = HttpRewardService(f"http://{HOST}:{port}/s", reach=AddressPolicy())
    await service.request_score(GIVEN, None)


async def https_reward(port: int) -> None:
    service = HttpRewardService(f"https://{HOST}:{port}/s", reach=AddressPolicy())
    await service.request_score(GIVEN, None)


async def grpc_reward(port: int) -> None:
    service = GrpcRewardService(f"grpc://{HOST}:{port}", reach=AddressPolicy())
    await service.request_score(GIVEN, None)


async def agent(port: int) -> None:
    url = f"http://{HOST}:{port}/agent"
    await AgentService(url, ExternalService(url, reach=AddressPolicy())).run({})


async def image(port: int) -> None:
    data = SimpleNamespace(max_image_bytes=1 << 20)
    reader = SimpleNamespace(_reach=AddressPolicy(), _data=data)
    url = f"http://{HOST}:{port}/image.png"
    await asyncio.to_thread(ImageReader._fetched, reader, url, "image 1")


async def openenv(port: int) -> None:
    pytest.importorskip("websockets")
    server = OpenEnv(
        f"openenv+http://{HOST}:{port}",
        reach=AddressPolicy(),
        action={},
        observe=None,
        timeout_s=5,
        wait_s=0.1,
    )
    await server.begin({}, seed=0)


async def _listening(serve):
    """Returns servers at both addresses with the same port, and the port."""
    for _ in range(20):
        public = await asyncio.start_server(serve, PUBLIC, 0)
        port = public.sockets[0].getsockname()[1]
        try:
            return public, await asyncio.start_server(serve, PRIVATE, port), port
        except OSError:  # another process has this port at the private address
            public.close()
    pytest.fail("no port is free at both addresses")


@pytest.mark.parametrize("connect", [http_reward, https_reward, grpc_reward, agent, image, openenv])
async def test_the_connection_is_made_to_the_address_that_was_checked(connect, monkeypatch):
    connections = {PUBLIC: 0, PRIVATE: 0}
    answers = iter([PUBLIC])
    resolve = socket.getaddrinfo

    def rebinding(host, port, *arguments, **options):
        address = next(answers, PRIVATE) if host in (HOST, HOST.encode()) else host
        return resolve(address, port, *arguments, **options)

    async def serve(reader, writer):
        connections[writer.get_extra_info("sockname")[0]] += 1
        writer.close()

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(outside, "is_public", lambda address: address == PUBLIC)
    public, private, port = await _listening(serve)
    async with public, private, asyncio.timeout(60):
        with suppress(BusyError, CallError, GroupError, outside.httpx.TransportError):
            await connect(port)
        with suppress(BusyError, CallError, GroupError, outside.httpx.TransportError):
            await connect(port)  # the name now resolves to the private address
    assert connections[PUBLIC] > 0
    assert connections[PRIVATE] == 0
