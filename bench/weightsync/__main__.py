"""Measures weight transfer: ``python -m bench.weightsync``.

Usage: python -m bench.weightsync [--smoke] [--sources T --receivers R] [--device cpu]

In one run, with one process per member: the raw limit (one broadcast of all bytes), a broadcast per
parameter, packed buckets as engines use them, and ours (prepare, verified transfer, adopt) in the
trainer's layout (fp32 masters, FSDP2 rows) and the rollouts' (fused parameters). Every row is
verified bit by bit. Prints a table and adds to ``bench/results/weightsync.json``.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.report import read_json, write_json
from bench.weightsync.rows import measure
from bench.weightsync.shapes import SHAPES

RESULTS = Path(__file__).parents[1] / "results" / "weightsync.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model over Gloo")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2.5-3b")
    parser.add_argument("--sources", type=int, default=1)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, help="default: 512, or 64 over Gloo, as in a run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, help="default: bench/results/weightsync.json")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.device, arguments.rounds = "smoke", "cpu", 3
        arguments.bucket_mib = 1
    use_gpu = arguments.device == "auto" and torch.cuda.is_available()
    arguments.bucket_mib = arguments.bucket_mib or (512 if use_gpu else 64)
    members = arguments.sources + arguments.receivers
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=measure, args=(number, arguments, use_gpu, store.port, queue))
        for number in range(members)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(30)
    _report(arguments, use_gpu, dict(results))


def _report(
    arguments: Any, use_gpu: bool, results: Mapping[int, dict[str, dict[str, float]]]
) -> None:
    """Prints and stores the slowest member of each row, compared with the limit."""
    rows: dict[str, dict[str, float]] = {}
    for result in results.values():
        for row, measures in result.items():
            for name, value in measures.items():
                earlier = rows.setdefault(row, {})
                earlier[name] = max(earlier.get(name, 0.0), value)
    gigabytes, raw_ms = rows["ours"]["gb"], rows["raw"]["ms"]
    device = torch.cuda.get_device_name(0) if use_gpu else "cpu"
    setting = f"{arguments.model} {arguments.sources}+{arguments.receivers} {device}"
    print(f"{setting}: {gigabytes:.3f} GB, buckets of {arguments.bucket_mib} MiB")
    for row, milliseconds in (
        ("raw", raw_ms),
        ("per_parameter", rows["per_parameter"]["ms"]),
        ("packed", rows["packed"]["ms"]),
        ("ours, verified", rows["ours"]["transfer_ms"]),
    ):
        rate = gigabytes / milliseconds * 1000
        print(
            f"  {row:16} {milliseconds:9.2f} ms {rate:8.1f} GB/s {raw_ms / milliseconds:6.1%} of raw"
        )
    for row in ("ours", "decoding"):
        if row in rows:
            print(
                f"  {row:16} "
                + ", ".join(f"{name} {value:.2f}" for name, value in rows[row].items())
            )
    if arguments.smoke and arguments.out is None:
        return
    out = arguments.out or RESULTS
    results_by_setting = read_json(out)
    results_by_setting.setdefault(setting, {}).update(
        bucket_mib=arguments.bucket_mib, rounds=arguments.rounds, rows=rows
    )
    write_json(out, results_by_setting)


if __name__ == "__main__":
    main()
