"""Measures the memory cost of strangers' connections: ``python -m bench.abuse.memory [NAME ...]``.

A stranger without a token opens 1,000 connections to a port of the controller or the transferqueue
and sends on each as much as the server accepts: headers, bodies, slow fragments, gRPC messages and
metadata, ZeroMQ frames. The benchmark measures the growth of both services' memory since before all
attacks, and the latency of honest clients meanwhile: of one that keeps its connection, and of one
that opens a new one for each request. Bars: less than 64 MiB, and a 99th percentile of at most
250 ms. ``cpu`` is the share of a core that a service used, and ``lag_ms`` how late this process's own
timers were, which shows what other processes on the machine cost. An attack that takes 1 GiB is
stopped. It takes ten minutes. Results go to
``bench/results/abuse-memory.json``; ``--smoke`` writes none.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from bench.abuse import strangers
from bench.report import write_json
from bench.whole_run import REPOSITORY
from services.cli.local import LocalServices, local_services
from services.controller.api.principals import TokenStore
from services.controller.settings import DATABASE_FILE
from services.controller.store.database import Database
from slipstream_client import AsyncClient

RESULTS = REPOSITORY / "bench" / "results" / "abuse-memory.json"
RISE_MIB, P99_MS = 64.0, 250.0
_STOPPED_AT_MIB = 1024.0
_SAMPLE_S = 0.05
_ASKS_EVERY_S = 0.05
_REGISTER = "/slipstream.controller.v1.MembershipService/RegisterWorker"
_GET_STATS = "/slipstream.transferqueue.v1.TransferQueueService/GetStats"


def own_mib(process: psutil.Process) -> float:
    """Returns the private memory of a process; the samples are in shared memory."""
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20


def orders(
    rest: int, controller: int, queue: int, data: int, token: str
) -> dict[str, dict[str, Any]]:
    """Returns all attacks by name."""
    result: dict[str, dict[str, Any]] = {}
    for attack in strangers.HTTP:
        result[f"rest/{attack.__name__}"] = {"port": rest, "attack": attack.__name__}
    # A user with a token of another project is authenticated, but must not exhaust the memory either.
    result["rest/bodies, with a token"] = {"port": rest, "attack": "bodies", "token": token}
    grpc = {
        "controller": {"port": controller, "method": _REGISTER, "message_bytes": 4 << 20},
        "transferqueue": {"port": queue, "method": _GET_STATS, "message_bytes": 4 << 20},
    }
    for name, where in grpc.items():
        for attack in strangers.GRPC:
            result[f"{name}/{attack.__name__}"] = {**where, "attack": attack.__name__}
    for attack in strangers.ZMQ:
        more = {"frame_bytes": 4 << 20, "attack": attack.__name__}
        result[f"data/{attack.__name__}"] = {"port": data, **more}
    return result


@dataclass(slots=True)
class Waits:
    """Seconds that honest requests took."""

    known_s: list[float] = field(default_factory=list)
    """Requests over one connection that stays open."""
    new: list[float] = field(default_factory=list)
    """Requests over a new connection each."""
    lag: list[float] = field(default_factory=list)
    """Seconds by which this process's timers were late."""
    num_failed: int = 0

    def summary(self) -> dict[str, Any]:
        """Returns percentiles in milliseconds."""
        return {
            "api_ms": _spread_ms(self.known_s),
            "new_connection_ms": _spread_ms(self.new) | {"failed": self.num_failed},
            "lag_ms": _spread_ms(self.lag),
        }

    def add(self, other: "Waits") -> None:
        """Adds the waits of an attack to those of all."""
        self.known_s += other.known_s
        self.new += other.new
        self.lag += other.lag
        self.num_failed += other.num_failed


@asynccontextmanager
async def asking(local: LocalServices, client: AsyncClient) -> AsyncIterator[Waits]:
    """Sends the requests of a person's run page while the block runs; yields how long they take."""
    waits = Waits()
    host, _, port = local.url.removeprefix("http://").rpartition(":")
    request = (
        f"GET /v1/runs HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {local.token}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()

    async def known() -> bool:
        await client.list_runs()
        return True

    async def new() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            return b"200 OK" in await reader.readline()
        finally:
            writer.close()

    async def ask(send: Callable[[], Awaitable[bool]], waits_s: list[float]) -> None:
        while True:
            begin, is_answered = time.monotonic(), False
            with suppress(Exception):
                is_answered = await send()
            end = time.monotonic()
            waits_s.append(end - begin)
            waits.num_failed += not is_answered
            await asyncio.sleep(_ASKS_EVERY_S)
            waits.lag.append(time.monotonic() - end - _ASKS_EVERY_S)

    tasks = [
        asyncio.create_task(ask(send, waits_s))  # noqa: TID251 -- cancelled below
        for send, waits_s in ((known, waits.known_s), (new, waits.new))
    ]
    try:
        yield waits
    finally:
        for task in tasks:
            task.cancel()


async def attacked(
    order: dict[str, Any],
    processes: dict[str, psutil.Process],
    most: dict[str, float],
    *,
    until: Awaitable[Any] | None = None,
) -> dict[str, Any]:
    """Runs one attack; updates each process's max memory.

    Args:
        until: Ends the attack when it is done; without it, the attack lasts ``seconds``.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.abuse.strangers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    ending = asyncio.create_task(_answer_of(process, order, until))  # noqa: TID251 -- awaited below
    before = {name: own_mib(service) for name, service in processes.items()}
    is_stopped = False
    while not ending.done():
        for name, service in processes.items():
            most[name] = max(most.get(name, 0.0), own_mib(service))
            if most[name] - before[name] > _STOPPED_AT_MIB and process.returncode is None:
                is_stopped = True
                process.kill()
        await asyncio.sleep(_SAMPLE_S)
    out = await ending
    return {"was_stopped": True} if is_stopped else json.loads(out)


async def _answer_of(
    process: asyncio.subprocess.Process, order: dict[str, Any], until: Awaitable[Any] | None
) -> bytes:
    assert process.stdin is not None
    text = json.dumps({**order, "until_closed": until is not None}).encode() + b"\n"
    if until is not None:
        process.stdin.write(text)
        await process.stdin.drain()
        await until
        text = b""
    out, _ = await process.communicate(text)
    return out


def _listening(process: psutil.Process) -> list[int]:
    connections = process.net_connections(kind="tcp")
    return [
        connection.laddr.port
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


async def measured(
    folder: Path, names: list[str], *, connections: int, seconds: float
) -> dict[str, Any]:
    """Runs all attacks, one after the other."""
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(local_services(folder / "state"))
        processes = {}
        for service in local.services:
            assert service.process is not None
            processes[service.name] = psutil.Process(service.process.pid)
        client = await stack.enter_async_context(AsyncClient(local.url, token=local.token))
        tokens = TokenStore(Database(f"sqlite:///{folder / 'state' / DATABASE_FILE}"))
        other = tokens.create(name="other", project="other", role="operator")
        queue = json.loads(local.services[0].ready_file.read_text())
        ports = {
            "rest": int(local.url.rpartition(":")[2]),
            "controller": int(local.grpc_address.rpartition(":")[2]),
            "queue": int(queue["address"].rpartition(":")[2]),
            "data": int(queue["data"].rpartition(":")[2]),
        }
        async with asking(local, client) as quiet:
            await asyncio.sleep(seconds)
        before = {name: own_mib(process) for name, process in processes.items()}
        attacks: dict[str, Any] = {}
        waits = Waits()
        for name, order in orders(**ports, token=other).items():
            if names and not any(name.startswith(process) for process in names):
                continue
            most: dict[str, float] = {}
            begin, used_s = time.monotonic(), {key: _cpu_s(processes[key]) for key in processes}
            async with asking(local, client) as attack_waits:
                answered = await attacked(
                    {**order, "connections": connections, "seconds": seconds}, processes, most
                )
            wall_s = time.monotonic() - begin
            rises = {key: round(most[key] - before[key], 1) for key in most}
            cpu = {key: round((_cpu_s(processes[key]) - used_s[key]) / wall_s, 2) for key in most}
            waits.add(attack_waits)
            attacks[name] = {"rise_mib": rises, "cpu": cpu, **attack_waits.summary(), **answered}
            print(f"{name:40} {json.dumps(attacks[name])}", flush=True)
            await asyncio.sleep(1.0)
        after = {name: own_mib(process) for name, process in processes.items()}
    most_mib = max(rise for process in attacks.values() for rise in process["rise_mib"].values())
    attacked_ms = waits.summary()
    p99_ms = max(attacked_ms[name]["p99"] for name in ("api_ms", "new_connection_ms"))
    return {
        "connections": connections,
        "seconds_each": seconds,
        "attacks": attacks,
        "kept_mib": {name: round(after[name] - before[name], 1) for name in after},
        "quiet": quiet.summary(),
        "attacked": attacked_ms,
        "most_mib": most_mib,
        "bars": {"most_mib": RISE_MIB, "p99_ms": P99_MS},
        "load": round(os.getloadavg()[0], 1),
        "holds": most_mib < RISE_MIB and p99_ms <= P99_MS and not waits.num_failed,
    }


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _spread_ms(waits_s: list[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    cuts = (
        quantiles(waits_s, n=100, method="inclusive")
        if len(waits_s) > 1
        else [max(waits_s, default=0.0)] * 99
    )
    spread = {"p50": cuts[49], "p99": cuts[98], "max": max(waits_s, default=0.0)}
    return {name: round(1000 * value, 1) for name, value in spread.items()} | {"n": len(waits_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks whose names begin so")
    parser.add_argument("--smoke", action="store_true", help="50 connections, two seconds each")
    options = parser.parse_args()
    connections, seconds = (50, 2.0) if options.smoke else (1000, 15.0)
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(
            measured(Path(name), options.names, connections=connections, seconds=seconds)
        )
    print(json.dumps({key: value for key, value in result.items() if key != "attacks"}, indent=1))
    if not options.smoke and not options.names:
        write_json(RESULTS, result)
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
