"""Time from a finished step until every rollout serves its weights, with the services' own parts.

``python -m bench.weightsync.end_to_end [--smoke] [--trainers T --rollouts R]``

The controller's session and rendezvous run in this process. Each trainer rank is a process with an
FSDP2 policy, its leader or follower and its weight member; each rollout is a process with the torch
engine, which decodes all the time, and its weight member. They use gRPC, as in a run. At the end
every live parameter is compared with the trainer's, cast to the dtype of the transfer, bit by bit.
Adds to ``bench/results/weightsync.json``.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.report import read_json, write_json
from bench.weightsync.members import run_rollout, run_trainer_rank
from bench.weightsync.shapes import SHAPES
from services.common.rpc.server import serve
from services.common.runspec.run import WeightSyncSpec
from services.controller.api.membership import RendezvousServicer
from services.controller.membership import RendezvousStore, Worker
from services.controller.run.weights.session import SyncReport, WeightSession
from slipstream.controller.v1 import membership_pb2_grpc

RESULTS = Path(__file__).parents[1] / "results" / "weightsync.json"


def parse(arguments: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model over Gloo")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2.5-3b")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--mode", default="shadow")
    parser.add_argument("--senders", default="ranks")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16, help="decoded at once by each rollout")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.rounds, options.bucket_mib, options.requests = "smoke", 3, 1, 2
    options.warm_up = 3
    options.use_gpu = torch.cuda.is_available() and not options.smoke
    options.dtype = "bfloat16" if options.use_gpu else "float32"
    return options


async def measure(options: Any) -> dict[str, float]:
    """Returns medians over the rounds; fails if a parameter differs at the end."""
    meetings = RendezvousStore()
    meetings.open("run_bench")
    rendezvous = RendezvousServicer(meetings)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    members: Any = context.Queue()
    add = membership_pb2_grpc.add_RendezvousServiceServicer_to_server
    async with serve("127.0.0.1:0", lambda server: add(rendezvous, server)) as port:
        shared = (options, f"127.0.0.1:{port}", store.port, members)
        processes = [
            context.Process(target=target, args=(number, *shared), daemon=True)
            for target, count in (
                (run_trainer_rank, options.trainers),
                (run_rollout, options.rollouts),
            )
            for number in range(count)
        ]
        for process in processes:
            process.start()
        try:
            reports = [await asyncio.to_thread(members.get, timeout=300) for _ in processes]
            return await _rounds(options, store, dict(reports))
        finally:
            for process in processes:
                process.kill()
                process.join()


async def _rounds(options: Any, store: Any, ports: dict[str, int]) -> dict[str, float]:
    session = WeightSession(
        WeightSyncSpec(
            mode=options.mode, senders=options.senders, bucket_bytes=options.bucket_mib << 20
        ),
        "run_bench",
    )
    rollouts = [_worker(name, port) for name, port in ports.items() if name.startswith("rollout")]
    await session.open(_worker("trainer-0", ports["trainer-0"]), rollouts)
    reports: list[SyncReport] = []
    for version in range(options.rounds + options.warm_up):
        store.set(f"step/{version}", "1")
        done = [f"stepped/{version}/{rank}" for rank in range(options.trainers)]
        await asyncio.to_thread(store.wait, done)
        await asyncio.sleep(0.05)
        reports.append(await session.publish(partial(int, version)))
    store.set("end", "1")
    keys = [
        f"digest/{name}" for name in ["trainer", *(f"rollout-{i}" for i in range(len(rollouts)))]
    ]
    await asyncio.to_thread(store.wait, keys)
    digests = {store.get(key) for key in keys}
    await session.close()
    assert len(digests) == 1, "a rollout's weights are not the trainer's"
    counted_reports = reports[options.warm_up :]
    return {
        "gb": counted_reports[0].num_bytes / 1e9,
        "total_p50_ms": 1000 * statistics.median(r.total_s for r in counted_reports),
        "total_max_ms": 1000 * max(r.total_s for r in counted_reports),
        "prepare_p50_ms": 1000 * statistics.median(r.prepare_s for r in counted_reports),
        "transfer_p50_ms": 1000 * statistics.median(r.transfer_s for r in counted_reports),
        "adopt_p50_ms": 1000 * statistics.median(r.adopt_s for r in counted_reports),
        "check_p50_ms": 1000 * statistics.median(r.check_s for r in counted_reports),
        "stall_p50_ms": 1000 * statistics.median(r.stall_s for r in counted_reports),
        "tokens": sum(int(store.get(f"tokens/{i}")) for i in range(len(rollouts))),
    }


def _worker(name: str, port: int) -> Worker:
    return Worker(
        run_id="run_bench",
        worker_id=name,
        incarnation="1",
        role="trainer" if name.startswith("trainer") else "rollout",
        address=f"127.0.0.1:{port}",
        host_id="host",
        last_heartbeat=0.0,
    )


def main() -> None:
    options = parse()
    row = asyncio.run(measure(options))
    device = torch.cuda.get_device_name(0) if options.use_gpu else "cpu"
    setting = f"{options.model} {options.trainers}+{options.rollouts} {device}"
    print(f"end to end, {options.mode}, {setting}")
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if not options.smoke:
        results = read_json(RESULTS)
        results.setdefault(setting, {})[f"end_to_end/{options.mode}"] = row
        write_json(RESULTS, results)


if __name__ == "__main__":
    main()
