"""One member's side of the measurement of all rows, in a separate process."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.weightsync.decoding import Decoding
from bench.weightsync.shapes import SHAPES
from bench.weightsync.sides import (
    Rollout,
    Store,
    TrainerRank,
    broadcast_each,
    broadcast_packed,
    random_tensor,
    raw_broadcast,
    synchronize,
)
from services.weightsync.group import RankAssignment, form_group
from services.weightsync.member import WeightMember
from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import make_plan, row_shards, version_digest


def measure(number: int, arguments: Any, use_gpu: bool, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", number) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    bench = Bench(number, arguments, device, store)
    queue.put((number, bench.run()))


def _request(version: int) -> TransferRequest:
    return TransferRequest(epoch=1, version=version, timeout_s=60)


class Bench:
    """One member's side of all rows."""

    def __init__(self, number: int, arguments: Any, device: torch.device, store: Any) -> None:
        self._number = number
        self._arguments = arguments
        self._device = device
        self._store = store
        self._barriers = 0
        self._source = number if number < arguments.sources else None
        self._specs = SHAPES[arguments.model].tensors("bfloat16")
        self._transport = "nccl" if device.type == "cuda" else "gloo"
        self._way = "ours"
        self._rows: dict[str, dict[str, float]] = {}

    def run(self) -> dict[str, dict[str, float]]:
        """Measures all rows: ``{row: {measure: value}}``."""
        self._usual_transports()
        asyncio.run(self._ours(backend=self._transport))
        return self._rows

    def _usual_transports(self) -> None:
        """Sends whole bf16 tensors from source 0 to all receivers; other sources do not take part."""
        if self._source not in (None, 0):
            for _ in range(3 * (self._arguments.rounds + 2)):
                self._barrier()
            return
        group = form_group(
            self._transport,
            Store(self._store, "usual"),
            RankAssignment(
                sources=(0,),
                num_sources=1,
                rank=0 if self._source == 0 else self._number - self._arguments.sources + 1,
                num_receivers=self._arguments.receivers,
            ),
            host="127.0.0.1",
            device=self._device,
            timeout_s=120,
            folder=Path(tempfile.gettempdir()),
        )
        channel = group.channels[0]
        is_source = self._source == 0
        dtype = torch.bfloat16
        buffer = torch.empty(
            sum(spec.num_rows * spec.row_bytes for spec in self._specs),
            dtype=torch.uint8,
            device=self._device,
        )
        tensors, offset = [], 0
        for spec in self._specs:
            size = spec.num_rows * spec.row_bytes
            tensors.append(buffer[offset : offset + size].view(dtype).view(spec.shape))
            offset += size
        if is_source:
            for index, (spec, tensor) in enumerate(zip(self._specs, tensors, strict=True)):
                tensor.copy_(random_tensor(spec, 0, index, self._device))
        bucket_bytes = self._arguments.bucket_mib << 20
        rows: dict[str, Callable[[], None]] = {
            "raw": lambda: raw_broadcast(channel, buffer),
            "per_parameter": lambda: broadcast_each(channel, tensors),
            "packed": lambda: broadcast_packed(
                channel, tensors, is_source=is_source, bucket_bytes=bucket_bytes
            ),
        }
        for name, operation in rows.items():
            self._rows[name] = {"ms": self._timed(operation)}
        if not is_source:
            for index, (spec, tensor) in enumerate(zip(self._specs, tensors, strict=True)):
                expected = random_tensor(spec, 0, index, self._device).to(dtype)
                assert torch.equal(tensor, expected), f"{spec.name} differs"
        group.abort()

    async def _ours(self, *, mode: str = "shadow", backend: str) -> None:
        arguments = self._arguments
        shards = row_shards(self._specs, arguments.sources)
        trainer = rollout = None
        if self._source is None:
            rollout = Rollout(self._specs, self._device)
        else:
            trainer = TrainerRank(self._specs, shards[self._source], self._device)
        member = WeightMember(
            source=trainer,
            sink=rollout,
            device=self._device,
            host="127.0.0.1",
            rendezvous=lambda scope: Store(self._store, scope),
        )
        plan_hash = member.agree_plan(
            self._specs,
            arguments.bucket_mib << 20,
            num_sources=arguments.sources,
            source=self._source,
            mode=mode,
        )
        plan = make_plan(self._specs, arguments.bucket_mib << 20, shards)
        begin = time.perf_counter()
        await member.form_group(
            1,
            receiver=max(self._number - arguments.sources, 0),
            num_receivers=arguments.receivers,
            backend=backend,
            scope=self._way,
            timeout_s=120,
        )
        form_ms = (time.perf_counter() - begin) * 1000
        samples: dict[str, list[float]] = {}
        for version in range(arguments.rounds + 2):
            measured = await self._sync(member, trainer, rollout, plan_hash, version)
            if version >= 2:
                for name, value in measured.items():
                    samples.setdefault(name, []).append(value)
        self._rows[self._way] = {
            name: statistics.median(values) for name, values in samples.items()
        } | {
            "transfer_p95_ms": statistics.quantiles(
                samples["transfer_ms"], n=20, method="inclusive"
            )[-1],
            "form_ms": form_ms,
            "gb": plan.num_bytes / 1e9,
        }
        if backend == "nccl":
            await self._beside_decoding(member, trainer, rollout, plan_hash, arguments.rounds + 2)

    async def _sync(
        self,
        member: WeightMember,
        trainer: TrainerRank | None,
        rollout: Rollout | None,
        plan_hash: str,
        version: int,
    ) -> dict[str, float]:
        if trainer is not None:
            trainer.change(version)
        synchronize(self._device)
        self._barrier()
        begin = time.perf_counter()
        await member.prepare(1, version, plan_hash)
        prepared = time.perf_counter()
        self._barrier()
        start = time.perf_counter()
        report = await member.transfer(_request(version))
        transferred = time.perf_counter()
        measured = {
            "prepare_ms": (prepared - begin) * 1000,
            "transfer_ms": (transferred - start) * 1000,
            "trainer_blocked_ms": 0.0 if trainer is None else (prepared - begin) * 1000,
        }
        digests = self._digests(version, report.digests)
        if rollout is not None:
            adopting = time.perf_counter()
            measured["stall_ms"] = 1000 * await member.adopt(version, version_digest(digests))
            measured["adopt_ms"] = (time.perf_counter() - adopting) * 1000
            differing = rollout.differs_from(self._specs, version)
            assert not differing, f"version {version}: {differing[:3]} differ"
        return measured

    async def _beside_decoding(
        self,
        member: WeightMember,
        trainer: TrainerRank | None,
        rollout: Rollout | None,
        plan_hash: str,
        version: int,
    ) -> None:
        """Decodes on the receivers before and during transfers."""
        if rollout is None:
            for offset in range(5):
                await self._sync(member, trainer, rollout, plan_hash, version + offset)
            return
        alone, beside, longest, transfers = [], [], [], []
        with Decoding(list(rollout.live.values())) as decoding:
            for offset in range(5):
                self._barrier()
                quiet = time.perf_counter()
                await member.prepare(1, version + offset, plan_hash)
                await asyncio.sleep(0.1)
                alone.append(decoding.step_ms(quiet, time.perf_counter() - 0.02)[0])
                self._barrier()
                begin = time.perf_counter()
                report = await member.transfer(_request(version + offset))
                end = time.perf_counter()
                decoding.wait_step()
                mean, worst = decoding.step_ms(begin, end)
                beside.append(mean)
                longest.append(worst)
                transfers.append((end - begin) * 1000)
                self._digests(version + offset, report.digests)
        self._rows["decoding"] = {
            "alone_ms": statistics.median(alone),
            "beside_ms": statistics.median(beside),
            "longest_ms": statistics.median(longest),
            "transfer_ms": statistics.median(transfers),
        }

    def _timed(self, operation: Callable[[], None]) -> float:
        samples = []
        for _ in range(self._arguments.rounds + 2):
            synchronize(self._device)
            self._barrier()
            begin = time.perf_counter()
            operation()
            synchronize(self._device)
            samples.append((time.perf_counter() - begin) * 1000)
        return statistics.median(samples[2:])

    def _digests(self, version: int, digests: tuple[str, ...]) -> list[str]:
        """Returns the sources' digests, as the controller would pass them on."""
        if self._source is not None:
            self._store.set(f"digest/{self._way}/{version}/{self._source}", digests[0])
        return [
            self._store.get(f"digest/{self._way}/{version}/{source}").decode()
            for source in range(self._arguments.sources)
        ]

    def _barrier(self) -> None:
        members = self._arguments.sources + self._arguments.receivers
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self._store.add(key, 1) == members:
            self._store.set(f"{key}/open", "1")
        self._store.wait([f"{key}/open"])
