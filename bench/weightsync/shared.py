"""Measures weight transfer on one shared GPU: ``python -m bench.weightsync.shared [--smoke]``.

A trainer and a rollout process have one device, as on a machine with a single GPU or when
colocated. The same versions are sent in every possible way: by handle on the device itself, and
through host memory by handle and by sockets. After each version the live parameters are compared
with the trainer's, cast to the dtype of the transfer, bit by bit. Results are printed and added to
``bench/results/weights-shared.json``. Without a GPU both processes use the CPU's memory.
"""

import argparse
import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.report import read_json, write_json
from bench.weightsync.rows import Bench
from bench.weightsync.shapes import SHAPES
from services.common.runspec.weight_modes import BUCKET_BYTES, MODES

RESULTS = Path(__file__).parents[1] / "results" / "weights-shared.json"
WAYS = {
    "by handle": ("shadow", "handle"),
    "by handle, in place": ("inplace", "handle"),
    "host memory, by handle": ("cpu_async", "handle"),
    "host memory, by sockets": ("cpu_async", "gloo"),
}
_PHASES = ("prepare_ms", "transfer_ms", "adopt_ms")


class _AllWays(Bench):
    """One member's side."""

    def run(self) -> dict[str, dict[str, float]]:
        """Measures all ways: ``{way: {measure: value}}``."""
        for way, (mode, backend) in WAYS.items():
            self._way = way
            wire = MODES[mode].wire_device(str(self._device))
            self._arguments.bucket_mib = self._arguments.mib or BUCKET_BYTES[wire] >> 20
            asyncio.run(self._ours(mode=mode, backend=backend))
            gc.collect()  # the arenas of this way
        return self._rows


def _measure(number: int, arguments: Any, use_gpu: bool, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    if number == 0:
        # As in a trainer: memory that torch allocates with this setting cannot be shared
        # everywhere.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # noqa: TID251
    device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    queue.put((number, _AllWays(number, arguments, device, store).run()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model, nothing is written")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, help="of a bucket; default: as in a run")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.rounds, arguments.mib = "smoke", 3, 1
    arguments.sources = arguments.receivers = 1
    use_gpu = torch.cuda.is_available()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_measure, args=(number, arguments, use_gpu, store.port, queue))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    members = [queue.get(timeout=600)[1] for _ in processes]
    for process in processes:
        process.join(30)
    report = {
        way: {name: round(max(member[way].get(name, 0.0) for member in members), 2) for name in row}
        for way, row in (members[0] | members[1]).items()
    }
    for row in report.values():
        row["total_ms"] = round(sum(row.get(phase, 0.0) for phase in _PHASES), 2)
    device = torch.cuda.get_device_name(0) if use_gpu else "cpu"
    setting = f"{arguments.model} on one {device}"
    print(json.dumps({setting: report}, indent=1))
    if not arguments.smoke:
        results = read_json(RESULTS)
        write_json(RESULTS, results | {setting: report})


if __name__ == "__main__":
    main()
