"""Measures the data plane against its peer: ``python -m bench.dataplane [--smoke]``.

Both sides move the same batches, alternating round by round; a ratio is the peer's time over ours
in the same round. Results go to ``bench/results/dataplane.json``.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

import torch

from bench.dataplane import limits, metadata
from bench.dataplane.fuzz import fuzz
from bench.dataplane.ratios import paired_ratio
from bench.dataplane.sides import ROOT, Ours, Peer, service
from bench.dataplane.workloads import NAMES, Workload, build
from bench.report import write_json

Row = dict[str, str | int | float]
Times = list[tuple[float, float]]


async def compare(num_units: int, rounds: int) -> list[Row]:
    """Measures both sides with all workloads."""
    rows: list[Row] = []
    with service() as address, Peer.start(num_units) as peer:
        async with (
            Ours.connect(address, use_shared_memory=True) as shared,
            Ours.connect(address, use_shared_memory=False) as network,
        ):
            for name in NAMES:
                workload = build(name)
                sides: dict[str, Times] = {"shared memory": [], "network": [], "peer": []}
                for number in range(rounds + 1):
                    check = number == 0
                    times = {
                        "shared memory": await shared.measure(workload, check=check),
                        "network": await network.measure(workload, check=check),
                        "peer": await asyncio.to_thread(peer.ask, case=name),
                    }
                    if number:
                        for side, pair in times.items():
                            sides[side].append(pair)
                rows += _rows(name, workload.size_bytes, num_units, sides)
                _print_rows(rows[-4:])
    return rows


def _rows(case: str, size_bytes: int, num_units: int, sides: dict[str, Times]) -> list[Row]:
    rows: list[Row] = []
    for path in ("shared memory", "network"):
        for number, op in enumerate(("put", "get")):
            ours = [pair[number] for pair in sides[path]]
            peer = [pair[number] for pair in sides["peer"]]
            ratio = paired_ratio(peer, ours)
            rows.append(
                {
                    "path": path,
                    "case": case,
                    "op": op,
                    "peer_units": num_units,
                    "ratio": round(ratio.middle, 2),
                    "ratio_low": round(ratio.low, 2),
                    "ratio_high": round(ratio.high, 2),
                    "gbps": round(size_bytes / median(ours) / 1e9, 3),
                    "ms": round(1e3 * median(ours), 3),
                    "peer_ms": round(1e3 * median(peer), 3),
                }
            )
    return rows


def _print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        print(
            f"{row['path']:14} {row['case']:10} {row['op']:4} units {row['peer_units']}  "
            f"{row['ratio']:6}x [{row['ratio_low']}, {row['ratio_high']}]  "
            f"{row['gbps']} GB/s  {row['ms']} ms, peer {row['peer_ms']} ms",
            flush=True,
        )


async def curve_cost(rounds: int) -> list[Row]:
    """Measures the network path with and without encryption, alternating."""
    rows: list[Row] = []
    with service() as plain_address, service(use_curve=True) as curve_address:
        async with (
            Ours.connect(plain_address, use_shared_memory=False) as plain,
            Ours.connect(curve_address, use_shared_memory=False) as curve,
        ):
            workload = build("rl1024")
            times = [
                (await plain.measure(workload), await curve.measure(workload))
                for _ in range(rounds + 1)
            ][1:]
    for number, op in enumerate(("put", "get")):
        ratio = paired_ratio([p[number] for p, _ in times], [c[number] for _, c in times])
        rows.append({"op": op, "curve_over_plain_speed": round(ratio.middle, 3)})
    return rows


async def several_clients(count: int, rounds: int) -> list[Row]:
    """Measures several clients at once, each with its own connection and samples, and the peer."""
    workload = build("rl256")
    sides: dict[str, list[float]] = {"shared memory": [], "network": [], "peer": []}
    with service() as address, Peer.start(2) as peer:
        async with AsyncExitStack() as stack:
            clients = {
                path: [
                    await stack.enter_async_context(
                        Ours.connect(address, use_shared_memory=path == "shared memory")
                    )
                    for _ in range(count)
                ]
                for path in ("shared memory", "network")
            }
            for _ in range(rounds + 1):
                for path, ours in clients.items():
                    sides[path].append(await _together(ours, workload))
                peer_s, _ = await asyncio.to_thread(peer.ask, case="rl256", clients=count)
                sides["peer"].append(peer_s)
    rows: list[Row] = []
    for path in ("shared memory", "network"):
        ratio = paired_ratio(sides["peer"][1:], sides[path][1:])
        gbps = 2 * count * workload.size_bytes / median(sides[path][1:]) / 1e9
        rows.append(
            {
                "path": path,
                "clients": count,
                "ratio": round(ratio.middle, 2),
                "ratio_low": round(ratio.low, 2),
                "ratio_high": round(ratio.high, 2),
                "gbps": round(gbps, 3),
            }
        )
    return rows


async def _together(clients: Sequence[Ours], workload: Workload) -> float:
    """Returns the seconds until all clients have put and got the batch."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, ours in enumerate(clients):
            tasks.create_task(ours.measure(workload, owner=str(number)))
    return time.perf_counter() - started


def physical_limits(rounds: int) -> dict[str, float]:
    """Returns the GB/s of other ways to move the bytes of rl1024."""
    size = build("rl1024").size_bytes
    seconds = {
        "memcpy": limits.memcpy_s(size, rounds),
        "tcp": limits.tcp_s(size, rounds),
        "zmq": limits.zmq_s(size, rounds),
        "grpc": limits.run_grpc_s(size, rounds),
    }
    redis = limits.redis_s(size, rounds)
    if redis is not None:
        seconds["redis_put"], seconds["redis_get"] = redis
    with Peer.start(1) as peer:
        times = [peer.ask(ray_bytes=size) for _ in range(rounds)]
    seconds["ray_put"] = median(put_s for put_s, _ in times)
    seconds["ray_get"] = median(get_s for _, get_s in times)
    return {name: round(size / value / 1e9, 3) for name, value in seconds.items()}


def shares_of_limits(limits_gbps: dict[str, float], rows: Sequence[Row]) -> list[Row]:
    """Returns the share of a plain copy or socket that each path reaches with rl1024."""
    limit_of = {"shared memory": "memcpy", "network": "tcp"}
    return [
        {
            "path": row["path"],
            "op": row["op"],
            "limit": limit_of[str(row["path"])],
            "share": round(float(row["gbps"]) / limits_gbps[limit_of[str(row["path"])]], 3),
        }
        for row in rows
        if row["case"] == "rl1024" and row["peer_units"] == 2
    ]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two rounds, to see that it works")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds = 2 if options.smoke else options.rounds
    torch.set_num_threads(1)
    num_keys = 10_000 if options.smoke else 100_000
    with service() as address:
        through_service = asyncio.run(metadata.service_figures(address, num_keys))
    limits_gbps = physical_limits(rounds)
    rows = [row for units in (2, 1) for row in asyncio.run(compare(units, rounds))]
    results = {
        "limits_gbps": limits_gbps,
        "shares_of_limits": shares_of_limits(limits_gbps, rows),
        "rows": rows,
        "curve": asyncio.run(curve_cost(rounds)),
        "several_clients": asyncio.run(several_clients(4, rounds)),
        "metadata": {
            "num_keys": num_keys,
            "service": through_service,
            "index": asyncio.run(metadata.index_figures(num_keys)),
            "index_at_10x": asyncio.run(metadata.index_figures(10 * num_keys)),
            "bytes_per_key": asyncio.run(metadata.bytes_per_key(num_keys // 10)),
        },
        "decoder": fuzz(10_000 if options.smoke else 1_000_000),
        "rounds": rounds,
        "load_average": os.getloadavg(),
        "num_cpus": os.cpu_count(),
    }
    print(json.dumps({name: value for name, value in results.items() if name != "rows"}, indent=2))
    if not options.smoke:
        path = ROOT / "bench" / "results" / "dataplane.json"
        write_json(path, results)


if __name__ == "__main__":
    main()
