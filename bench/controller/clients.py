"""API clients during active runs: latency of responses, and lag of event streams.

They share the machine with the controller, so they are as cheap as possible: one connection each,
and they read only the status and length of a response and, in a stream, the ids of its events.
"""

import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from bench.controller.stage import TOKEN, Stage

_PATHS = (
    "/v1/runs",
    "/v1/runs/{}",
    "/v1/runs/{}",
    "/v1/runs/{}/topology",
    "/v1/runs/{}/events?limit=50",
    "/v1/runs/{}/metrics?name=reward_mean&max_points=50",
    "/v1/quota",
)
# People and dashboards send a few requests per second each.
_PAUSE_S = 0.25


async def measure_api(system: Stage, *, is_smoke: bool) -> dict[str, Any]:
    """Measures latencies of 50 clients in three settings, during three active runs.

    The settings are: clients alone, with 500 event streams, and without pauses.
    """
    num_clients, num_streams, seconds = (5, 20, 2.0) if is_smoke else (50, 500, 30.0)
    runs = [
        await system.submit(
            steps=100_000,
            prompts_per_step=16,
            rollouts=2,
            group_s=(0.05, 0.2),
            step_s=1.0,
            running=64,
        )
        for _ in range(3)
    ]
    for run_id in runs:
        await system.until_step(run_id, 1)
    address = urlsplit(system.url)
    crowd = _Crowd(str(address.hostname), int(address.port or 80), runs, num_clients)
    result = {"clients": num_clients, "streams": num_streams}
    result |= {"without_streams": await crowd.ask(system, seconds, pause_s=_PAUSE_S)}
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(_Stream(crowd, runs[number % 3]))
            for number in range(num_streams)
        ]
        begin = time.perf_counter()
        while not all(stream.num_events for stream in streams):
            await asyncio.sleep(0.05)
        result |= {"streams_caught_up_s": time.perf_counter() - begin}
        before = [stream.num_events for stream in streams]
        result |= await crowd.ask(system, seconds, pause_s=_PAUSE_S)
        events = [s.num_events - then for s, then in zip(streams, before, strict=True)]
        result |= {"events_per_stream": {"least": min(events), "most": max(events)}}
    result |= {"without_pause": await crowd.ask(system, seconds / 2, pause_s=0.0)}
    return result


class _Crowd:
    """Clients that send different requests.

    Args:
        host: Host of the controller.
        port: Port of the controller.
        runs: Runs that the requests are about.
        num_clients: Number of clients.
    """

    def __init__(self, host: str, port: int, runs: list[str], num_clients: int) -> None:
        self.host, self.port = host, port
        self._runs = runs
        self._num_clients = num_clients

    async def ask(self, system: Stage, seconds: float, *, pause_s: float) -> dict[str, float]:
        """Sends requests from all clients for some time."""
        latencies: list[float] = []
        cpu_s = system.cpu_s()
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._num_clients):
                tasks.create_task(self._client(latencies, number, seconds, pause_s))
        quantiles = statistics.quantiles(latencies, n=100, method="inclusive")
        return {
            "requests_per_s": len(latencies) / seconds,
            "p50_ms": quantiles[49] * 1000,
            "p99_ms": quantiles[98] * 1000,
            "worst_ms": max(latencies) * 1000,
            "controller_cores": (system.cpu_s() - cpu_s) / seconds,
        }

    async def _client(
        self, latencies: list[float], number: int, seconds: float, pause_s: float
    ) -> None:
        chooser = random.Random(number)
        reader, writer = await asyncio.open_connection(self.host, self.port)
        await asyncio.sleep(chooser.uniform(0, pause_s))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            path = chooser.choice(_PATHS).format(chooser.choice(self._runs))
            begin = time.perf_counter()
            writer.write(_request(path))
            await _read_answer(reader)
            latencies.append(time.perf_counter() - begin)
            await asyncio.sleep(pause_s)
        writer.close()


class _Stream(asyncio.Protocol):
    """Counts the events of one run as they arrive."""

    def __init__(self, crowd: _Crowd, run_id: str) -> None:
        self._crowd = crowd
        self._path = f"/v1/runs/{run_id}/events/stream"
        self._rest = b""
        self.num_events = 0

    async def __aenter__(self) -> "_Stream":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: self, self._crowd.host, self._crowd.port
        )
        self._transport.write(_request(self._path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Handles a part of the stream, which may end within an event's id."""
        mark = b"\nid: "
        text = self._rest + data
        self.num_events += text.count(mark)
        self._rest = text[-len(mark) + 1 :]


def _request(path: str) -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    )


async def _read_answer(reader: asyncio.StreamReader) -> None:
    """Reads a response to its end.

    Raises:
        RuntimeError: If the response has an unexpected status.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    status, _, fields = head.lower().partition(b"\r\n")
    length = fields.partition(b"content-length:")[2].partition(b"\r\n")[0]
    if status.split()[1] != b"200" or not length:
        raise RuntimeError(f"the controller answered {status.decode()}")
    await reader.readexactly(int(length))
