"""Time from the trainer's weights to a rollout that serves them, through a folder.

``python -m bench.weightsync.storage [--smoke] [--folder F] [--millions N] [--device cuda] [--json FILE]``

The controller's session runs in this process; trainer and rollout are separate processes with a weight
member each, as in a run. Measured are whole versions, and differences of 1 % of the weights at random
places, of a model with 1.3 billion weights in bfloat16. Beside them stands the limit: the same number of
bytes, written to and read from the same folder in the same pieces, without anything else. ``processor_s`` is
the processor time of both processes, which other work of the host does not change much. At the end every
live weight is compared with the trainer's. Prints the result and writes
``bench/results/weights-storage.json``.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.multiprocessing as mp
import xxhash
from torch import Tensor

from bench.report import report_to
from services.common.rpc.server import serve
from services.common.runspec.run import WeightSyncSpec
from services.common.task_group import TaskGroup
from services.controller.membership import Worker
from services.controller.run.weights.session import WeightSession
from services.extras.stored_weights.local import LocalFolder
from services.weightsync.canary import Canary
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.weightsync.weight_plan import TensorSpec

RESULTS = Path(__file__).parents[1] / "results" / "weights-storage.json"
BARS_S = {"whole": 5.0, "changes of 1 %": 1.0}
_LAYERS, _CHANGED = 26, 0.01
_ROUNDS = 3
_PIECE_BYTES = 64 << 20
_CANARY = Canary((1, 2, 3), (-1.0, -2.0))


def _specs(num_weights: int) -> list[TensorSpec]:
    columns = 1000
    rows = num_weights // _LAYERS // columns
    return [TensorSpec(f"layer{i}", (rows, columns), "bfloat16") for i in range(_LAYERS)]


class _Trainer:
    """Weights that change on command."""

    def __init__(self, num_weights: int, device: torch.device) -> None:
        self.specs = _specs(num_weights)
        first = torch.randint(-(2**14), 2**14, self.specs[0].shape, dtype=torch.int16)
        self.tensors = {
            spec.name: first.roll(number).view(torch.bfloat16).to(device)
            for number, spec in enumerate(self.specs)
        }

    def change(self, fraction: float) -> None:
        for tensor in self.tensors.values():
            words = tensor.view(-1).view(torch.int16)
            places = torch.randint(len(words), (int(len(words) * fraction),), device=words.device)
            words[places] ^= 1  # a place that is drawn twice changes once

    def weight_specs(self) -> list[TensorSpec]:
        return self.specs

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def score_canary(self) -> Canary:
        return _CANARY


class _Rollout:
    """Live weights, into which adopted versions are copied."""

    def __init__(self, num_weights: int, device: torch.device) -> None:
        self.tensors = {
            spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device)
            for spec in _specs(num_weights)
        }

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        since = time.perf_counter()
        await asyncio.to_thread(self._copy, tensors)
        return time.perf_counter() - since

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
        if tensor.is_cuda:
            torch.cuda.synchronize()

    async def score(self, token_ids: Any) -> Any:
        return _CANARY.logprobs

    async def refuse_weights(self, reason: str) -> None:
        raise AssertionError(reason)


def _run(role: str, num_weights: int, device: torch.device, pipe: Any) -> None:
    asyncio.run(_serve(role, num_weights, device, pipe))


async def _serve(role: str, num_weights: int, device: torch.device, pipe: Any) -> None:
    weights = (_Trainer if role == "trainer" else _Rollout)(num_weights, device)
    side = {"source" if role == "trainer" else "sink": weights}
    member = WeightMember(
        **cast("Any", side),
        device=device,
        host="127.0.0.1",
        rendezvous=cast("Any", lambda scope: None),
    )
    async with serve("127.0.0.1:0", partial(serve_member, member)) as port:
        pipe.send(port)
        while (command := await asyncio.to_thread(pipe.recv)) != "end":
            if command == "processor_s":
                pipe.send(time.process_time())
            elif command == "digest":
                pipe.send(await asyncio.to_thread(_digest, weights.tensors))
            else:
                assert isinstance(weights, _Trainer)
                await asyncio.to_thread(weights.change, command)
                pipe.send("changed")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    total = xxhash.xxh3_128()
    for tensor in tensors.values():
        array: Any = tensor.view(-1).view(torch.uint8).cpu().numpy()
        total.update(array.data)
    return total.hexdigest()


def _raw_s(folder: Path, num_bytes: int, piece_bytes: int) -> float:
    """Returns the seconds to write and read bytes in pieces, one after the other."""
    store, piece = LocalFolder(str(folder / "raw")), memoryview(bytearray(os.urandom(piece_bytes)))
    sizes = [min(piece_bytes, num_bytes - start) for start in range(0, num_bytes, piece_bytes)]
    since = time.perf_counter()
    for number, size in enumerate(sizes):
        store.put(f"{number}", piece[:size])
    for number, size in enumerate(sizes):
        store.read_into(f"{number}", piece[:size])
    seconds = time.perf_counter() - since
    shutil.rmtree(folder / "raw")
    return seconds


async def _measure(
    folder: Path, num_weights: int, mode: str, device: torch.device
) -> list[dict[str, float]]:
    """Returns the measures of each round with new processes."""
    context = mp.get_context("spawn")
    pipes, processes, workers = {}, [], []
    for role in ("trainer", "rollout"):
        pipes[role], far = context.Pipe()
        arguments = (role, num_weights, device, far)
        processes.append(context.Process(target=_run, args=arguments, daemon=True))
        processes[-1].start()
        port = await asyncio.to_thread(pipes[role].recv)
        workers.append(
            Worker(
                run_id="run_bench",
                worker_id=role,
                incarnation="1",
                role=role,
                address=f"127.0.0.1:{port}",
                host_id="here",
                last_heartbeat=0.0,
            )
        )
    spec = WeightSyncSpec.model_validate(
        {
            "backend": "storage",
            "mode": mode,
            "answer_timeout_s": 60.0,
            "storage": {"directory": str(folder), "keep": 2},
        }
    )
    session = WeightSession(spec, "run_bench", first_epoch=1 << 20)
    await session.open(workers[0], [workers[1]])
    async with TaskGroup() as tasks:
        following = tasks.create_task(session.follow(_nothing))
        rounds = [await _publish(session, version, pipes, folder) for version in range(_ROUNDS + 1)]
        following.cancel()
    await session.close()
    digests = set()
    for pipe in pipes.values():
        pipe.send("digest")
        digests.add(await asyncio.to_thread(pipe.recv))
        pipe.send("end")
    assert len(digests) == 1, "the rollout serves other weights than the trainer has"
    for process in processes:
        process.join(30)
    return rounds[1:]  # the first one touches new memory


def _summary(row: str, rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    medians = {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}
    slowest_s = round(max(r["seconds"] for r in rounds), 2)
    return medians | {"slowest_s": slowest_s, "bar_s": BARS_S[row]}


async def _processor_s(pipes: Mapping[str, Any]) -> float:
    """Returns the processor seconds of all processes so far."""
    for pipe in pipes.values():
        pipe.send("processor_s")
    return sum([await asyncio.to_thread(pipe.recv) for pipe in pipes.values()])


async def _publish(
    session: WeightSession, version: int, pipes: Mapping[str, Any], folder: Path
) -> dict[str, float]:
    """Changes the trainer's weights, and measures until the rollout serves them."""
    pipes["trainer"].send(_CHANGED)
    await asyncio.to_thread(pipes["trainer"].recv)
    before_s = await _processor_s(pipes)
    since = time.perf_counter()
    report = await session.publish(lambda: version)
    seconds = time.perf_counter() - since
    processor_s = await _processor_s(pipes) - before_s
    assert report.receivers == ("rollout",)
    return {
        "seconds": seconds,
        "copy_s": report.prepare_s,
        "write_s": report.transfer_s,
        "read_and_adopt_s": report.adopt_s,
        "adopt_s": report.stall_s,
        "megabytes": report.num_bytes / 1e6,
        "processor_s": processor_s,
        "raw_s": _raw_s(folder, report.num_bytes, _PIECE_BYTES),
    }


async def _nothing() -> None:
    """Stands for the publisher, which learns of late rollouts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model; nothing is written")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: temporary files"
    )
    parser.add_argument(
        "--millions", type=int, default=1300, help="of weights; 10 bytes of memory each"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    num_weights = 2_600_000 if arguments.smoke else arguments.millions * 1_000_000
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = {
            row: _summary(row, asyncio.run(_measure(Path(folder), num_weights, mode, device)))
            for row, mode in (("whole", "shadow"), ("changes of 1 %", "delta"))
        }
    load = os.getloadavg()[0]
    host = f"{os.cpu_count()} CPU cores, load {load:.0f} by other work"
    if arguments.device == "cuda":
        host = f"{torch.cuda.get_device_name(0)}, {host}"
    result = {"weights": num_weights, "dtype": "bfloat16", "host": host, "rounds": _ROUNDS, **rows}
    report_to(None if arguments.smoke else arguments.json, result)


if __name__ == "__main__":
    main()
