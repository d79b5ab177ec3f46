"""Process of the attacking identity: ``python -m bench.abuse.attacks``, with its order on standard input.

It has an API token of one project, a forged token of a worker, and access to every port on
loopback. It sends oversized, malformed, slow and concurrent requests, and prints the responses as
JSON.
"""

import asyncio
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import httpx
import zmq
import zmq.asyncio

from slipstream.controller.v1 import membership_pb2, run_pb2
from slipstream.rollout.v1 import rollout_pb2
from slipstream.trainer.v1 import trainer_pb2
from slipstream.transferqueue.v1 import transferqueue_pb2
from slipstream.weightsync.v1 import weightsync_pb2

_FILES = (membership_pb2, run_pb2, rollout_pb2, trainer_pb2, transferqueue_pb2, weightsync_pb2)
_METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_FRAMES, _FRAME_BYTES = 480, 64 << 10
_HALF_OPEN = 40
"""Concurrent silent connections per port."""
_NUM_STREAMS = 300
_LONGEST_S = 15.0

Answers = Counter[str]


def _nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


class Attacker:
    """Attacks until it is cancelled.

    Args:
        order: ``url``, ``token``, ``forged``, ``ports``, ``spec``, ``seed``.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._choice = random.Random(order["seed"])
        self.answers: dict[str, Answers] = {}
        self._http = httpx.AsyncClient(
            base_url=order["url"],
            timeout=_LONGEST_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=_NUM_STREAMS + 100),
            headers={
                "Authorization": f"Bearer {order['token']}",
                "Content-Type": "application/json",
            },
        )

    async def attack(self) -> None:
        """Runs all attacks concurrently and repeatedly."""
        ports = self._order["ports"]
        loops = [
            self._again("rest oversized", self._oversized, 0.5),
            self._again("rest malformed", self._malformed, 0.1),
            self._again("rest unknown tokens", self._guess, 0.02),
            *(self._again("rest concurrent", self._list, 0.01) for _ in range(16)),
            *(self._again("rest streams", self._stream, 6.0) for _ in range(_NUM_STREAMS)),
        ]
        for port in ports:
            loops += [
                self._again(f"garbage to {ports[port]}", lambda p=port: self._garbage(p), 0.3),
                self._again(f"grpc to {ports[port]}", lambda p=port: self._call(p), 0.05),
                self._again(f"http to {ports[port]}", lambda p=port: self._post(p), 0.5),
                self._again(f"zmq to {ports[port]}", lambda p=port: self._frames(p), 1.0),
                *(
                    self._again(f"slow to {ports[port]}", lambda p=port: self._say_little(p), 0.5)
                    for _ in range(_HALF_OPEN)
                ),
            ]
        await asyncio.gather(*loops)

    async def _again(self, name: str, once: Callable[[], Awaitable[str]], pause_s: float) -> None:
        answers = self.answers.setdefault(name, Counter())
        while True:
            await asyncio.sleep(pause_s * (0.5 + self._choice.random()))
            try:
                async with asyncio.timeout(2 * _LONGEST_S):
                    answers[await once()] += 1
            except (OSError, httpx.HTTPError, TimeoutError) as error:
                answers[type(error).__name__] += 1

    async def _oversized(self) -> str:
        megabytes = self._choice.choice((0.3, 2, 20))
        text = "a" * int(megabytes * (1 << 20))
        spec = {**self._order["spec"], "name": text}
        return str((await self._http.post("/v1/runs", content=json.dumps(spec))).status_code)

    async def _malformed(self) -> str:
        spec = self._order["spec"]
        content = self._choice.choice(
            (
                os.urandom(2000),
                b"[" * 50_000,
                _nested(900).encode(),
                json.dumps({**spec, "rollout": {"answer_pattern": "(a+)+" * 2000}}).encode(),
                json.dumps({**spec, "trainer": {"steps": 10**400}}).encode(),
                json.dumps({**spec, "labels": [{}] * 20_000}).encode(),
                json.dumps({**spec, "model": {"path": "../../../../etc"}}).encode(),
            )
        )
        return str((await self._http.post("/v1/runs", content=content)).status_code)

    async def _guess(self) -> str:
        headers = {"Authorization": f"Bearer slp_{os.urandom(16).hex()}"}
        return str((await self._http.get("/v1/runs", headers=headers)).status_code)

    async def _list(self) -> str:
        path = self._choice.choice(("/v1/runs?page_size=500", "/v1/quota", "/v1/runs/run_0", "/x"))
        return str((await self._http.get(path)).status_code)

    async def _stream(self) -> str:
        """Holds a stream of events."""
        path = f"/v1/runs/{self._order['run_id']}/events/stream"
        async with self._http.stream("GET", path) as answer:
            with suppress(httpx.ReadTimeout):
                async for _ in answer.aiter_bytes():
                    pass
            return str(answer.status_code)

    async def _garbage(self, port: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        try:
            with suppress(ConnectionError):
                writer.write(os.urandom(1 << 16))
                await writer.drain()
            async with asyncio.timeout(_LONGEST_S):
                while await reader.read(1 << 16):
                    pass
            return "closed"
        finally:
            writer.close()

    async def _say_little(self, port: str) -> str:
        """Sends nothing, or a request byte by byte."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        text = self._choice.choice(
            (b"", b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nX-Slow: aaaaaa")
        )
        try:
            async with asyncio.timeout(_LONGEST_S):
                for letter in text:
                    writer.write(bytes([letter]))
                    await asyncio.sleep(0.3)
                while await reader.read(1 << 16):
                    pass
            return "closed"
        except TimeoutError:
            return "left open"
        finally:
            writer.close()

    async def _post(self, port: str) -> str:
        path = self._choice.choice(("/v1/chat/completions", "/v1/completions", "/page/sign-in"))
        body = self._choice.choice((os.urandom(1000), b"[" * 100_000, b'{"a":"' + b"a" * (8 << 20)))
        url = f"http://127.0.0.1:{port}{path}"
        return str((await self._http.post(url, content=body)).status_code)

    async def _call(self, port: str) -> str:
        token = self._choice.choice(("", self._order["token"], self._order["forged"]))
        message = self._choice.choice((os.urandom(200), b"\x0a\x05run_1", bytes(5 << 20)))
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary(self._choice.choice(_METHODS))
            try:
                await method(message, metadata=metadata, timeout=_LONGEST_S)
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    async def _frames(self, port: str) -> str:
        """Sends one message of very many frames, from a peer without a key."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.SNDTIMEO, 2000)
            peer.setsockopt(zmq.RCVTIMEO, 2000)
            peer.connect(f"tcp://127.0.0.1:{port}")
            try:
                await peer.send_multipart([bytes(_FRAME_BYTES)] * _FRAMES)
                return f"answered {len(await peer.recv_multipart())}"
            except zmq.Again:
                return "not answered"


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    attacker = Attacker(order)
    with suppress(TimeoutError):
        async with asyncio.timeout(order["seconds"]):
            await attacker.attack()
    print(json.dumps(attacker.answers))


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # servers should end connections
    os.nice(19)  # an attacker on another machine takes no CPU time from the services
    asyncio.run(main())
