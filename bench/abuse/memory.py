"""Measures the memory cost of strangers' connections: ``python -m bench.abuse.memory [NAME ...]``.

A stranger without a token opens 1,000 connections to a port of the controller or the transferqueue
and sends on each as much as the server accepts: headers, bodies, slow fragments, gRPC messages and
metadata, ZeroMQ frames. The benchmark measures the growth of both services' memory since before all
attacks, and the latency of honest clients meanwhile. Bars: less than 64 MiB, and a 99th percentile
of at most 250 ms. An attack that takes 1 GiB is stopped. It takes ten minutes. Results go to
``bench/results/abuse-memory.json``; ``--smoke`` writes none.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from bench.abuse import strangers
from bench.whole_run import REPOSITORY
from services.cli.local import local_services
from slipstream_client import AsyncClient

RESULTS = REPOSITORY / "bench" / "results" / "abuse-memory.json"
RISE_MIB, P99_MS = 64.0, 250.0
_STOPPED_AT_MIB = 1024.0
_SAMPLE_S = 0.05
_ASKS_EVERY_S = 0.05
_QUIET_S = 3.0
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
    found: dict[str, dict[str, Any]] = {}
    for attack in strangers.HTTP:
        found[f"rest/{attack.__name__}"] = {"port": rest, "attack": attack.__name__}
    # A user with a token of another project is no stranger, but may not take the memory either.
    found["rest/bodies, with a token"] = {"port": rest, "attack": "bodies", "token": token}
    grpc = {
        "controller": {"port": controller, "method": _REGISTER, "message_bytes": 4 << 20},
        "transferqueue": {"port": queue, "method": _GET_STATS, "message_bytes": 4 << 20},
    }
    for name, where in grpc.items():
        for attack in strangers.GRPC:
            found[f"{name}/{attack.__name__}"] = {**where, "attack": attack.__name__}
    for attack in strangers.ZMQ:
        more = {"frame_bytes": 4 << 20, "attack": attack.__name__}
        found[f"data/{attack.__name__}"] = {"port": data, **more}
    return found


async def ask(client: AsyncClient, waits_s: list[float]) -> None:
    """Sends the requests of a person's run page until cancelled; records each latency."""
    while True:
        begin = time.monotonic()
        with suppress(Exception):
            await client.list_runs()
        waits_s.append(time.monotonic() - begin)
        await asyncio.sleep(_ASKS_EVERY_S)


async def attacked(
    order: dict[str, Any], processes: dict[str, psutil.Process], most: dict[str, float]
) -> dict[str, Any]:
    """Runs one attack; updates each process's max memory."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.abuse.strangers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    ending = asyncio.create_task(process.communicate(json.dumps(order).encode() + b"\n"))  # noqa: TID251 -- awaited or cancelled below
    before = {name: own_mib(each) for name, each in processes.items()}
    is_stopped = False
    while not ending.done():
        for name, each in processes.items():
            most[name] = max(most.get(name, 0.0), own_mib(each))
            if most[name] - before[name] > _STOPPED_AT_MIB and process.returncode is None:
                is_stopped = True
                process.kill()
        await asyncio.sleep(_SAMPLE_S)
    out, _ = await ending
    return {"was_stopped": True} if is_stopped else json.loads(out)


def _listening(process: psutil.Process) -> list[int]:
    found = process.net_connections(kind="tcp")
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


async def measured(
    folder: Path, names: list[str], *, connections: int, seconds: float
) -> dict[str, Any]:
    """Runs all attacks, one after the other."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(local_services(folder / "state"))
        processes = {}
        for service in here.services:
            assert service.process is not None
            processes[service.name] = psutil.Process(service.process.pid)
        client = await stack.enter_async_context(AsyncClient(here.url, token=here.token))
        queue = json.loads(here.services[0].ready_file.read_text())
        ports = {
            "rest": int(here.url.rpartition(":")[2]),
            "controller": int(here.grpc_address.rpartition(":")[2]),
            "queue": int(queue["address"].rpartition(":")[2]),
            "data": int(queue["data"].rpartition(":")[2]),
        }
        quiet_s: list[float] = []
        watching = asyncio.create_task(ask(client, quiet_s))  # noqa: TID251 -- awaited or cancelled below
        await asyncio.sleep(_QUIET_S)
        watching.cancel()
        before = {name: own_mib(each) for name, each in processes.items()}
        found: dict[str, Any] = {}
        every_wait_s: list[float] = []
        for name, order in orders(**ports, token=here.token).items():
            if names and not any(name.startswith(each) for each in names):
                continue
            waits_s: list[float] = []
            most: dict[str, float] = {}
            watching = asyncio.create_task(ask(client, waits_s))  # noqa: TID251 -- awaited or cancelled below
            answered = await attacked(
                {**order, "connections": connections, "seconds": seconds}, processes, most
            )
            watching.cancel()
            rises = {key: round(most[key] - before[key], 1) for key in most}
            every_wait_s += waits_s
            found[name] = {"rise_mib": rises, "api_ms": _spread_ms(waits_s), **answered}
            print(f"{name:40} {json.dumps(found[name])}", flush=True)
            await asyncio.sleep(1.0)
        after = {name: own_mib(each) for name, each in processes.items()}
    most_mib = max(rise for each in found.values() for rise in each["rise_mib"].values())
    api_ms = _spread_ms(every_wait_s)
    return {
        "connections": connections,
        "seconds_each": seconds,
        "attacks": found,
        "kept_mib": {name: round(after[name] - before[name], 1) for name in after},
        "api_ms": {"quiet": _spread_ms(quiet_s), "attacked": api_ms},
        "most_mib": most_mib,
        "bars": {"most_mib": RISE_MIB, "p99_ms": P99_MS},
        "load": round(os.getloadavg()[0], 1),
        "holds": most_mib < RISE_MIB and api_ms["p99"] <= P99_MS,
    }


def _spread_ms(waits_s: list[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    cuts = quantiles(waits_s, n=100) if len(waits_s) > 1 else [max(waits_s, default=0.0)] * 99
    found = {"p50": cuts[49], "p99": cuts[98], "max": max(waits_s, default=0.0)}
    return {name: round(1000 * value, 1) for name, value in found.items()} | {"n": len(waits_s)}


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
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
