"""Clients of the API beside active runs: how long answers take, and whether streams keep up."""

import asyncio
import random
import statistics
import time
from typing import Any

import httpx

from bench.controller.stage import Stage

# What people and dashboards do: each client asks a few times a second.
_PAUSE_S = 0.25
_PATHS = (
    "/v1/runs",
    "/v1/runs/{}",
    "/v1/runs/{}",
    "/v1/runs/{}/topology",
    "/v1/runs/{}/events?limit=50",
    "/v1/runs/{}/metrics?name=reward_mean&max_points=50",
    "/v1/quota",
)


async def measure_api(here: Stage, *, is_smoke: bool) -> dict[str, Any]:
    """Latencies of 50 clients with 500 event streams open, beside three runs."""
    num_clients, num_streams, seconds = (5, 20, 4.0) if is_smoke else (50, 500, 30.0)
    runs = [
        await here.submit(
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
        await here.until_step(run_id, 1)
    latencies: list[float] = []
    received = [0] * num_streams
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=here.url, trust_env=False, timeout=60, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        streams = [
            tasks.create_task(_stream(http, runs[number % 3], received, number))
            for number in range(num_streams)
        ]
        await asyncio.sleep(3.0)
        before = list(received)
        clients = [
            tasks.create_task(_client(http, runs, latencies, seconds, number))
            for number in range(num_clients)
        ]
        await asyncio.wait(clients)
        events = [now - then for now, then in zip(received, before, strict=True)]
        for task in streams:
            task.cancel()
    quantiles = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "clients": num_clients,
        "streams": num_streams,
        "requests_per_s": len(latencies) / seconds,
        "p50_ms": quantiles[49] * 1000,
        "p99_ms": quantiles[98] * 1000,
        "events_per_stream": {"least": min(events), "most": max(events)},
    }


async def _client(
    http: httpx.AsyncClient, runs: list[str], latencies: list[float], seconds: float, seed: int
) -> None:
    chooser = random.Random(seed)
    end = time.perf_counter() + seconds
    await asyncio.sleep(chooser.uniform(0, _PAUSE_S))
    while time.perf_counter() < end:
        path = chooser.choice(_PATHS)
        begin = time.perf_counter()
        response = await http.get(path.format(chooser.choice(runs)))
        latencies.append(time.perf_counter() - begin)
        response.raise_for_status()
        await asyncio.sleep(_PAUSE_S)


async def _stream(http: httpx.AsyncClient, run_id: str, received: list[int], number: int) -> None:
    async with http.stream("GET", f"/v1/runs/{run_id}/events/stream") as response:
        async for line in response.aiter_lines():
            received[number] += line.startswith("id:")
