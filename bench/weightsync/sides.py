"""The compared sides: a trainer rank, a rollout with fused parameters, and the usual transports."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.weightsync.shapes import fused_name
from services.weightsync.arena import copy_all
from services.weightsync.canary import Canary
from services.weightsync.endpoints import Place
from services.weightsync.group import Channel
from services.weightsync.modes.placing import live_placer
from services.weightsync.weight_plan import TensorSpec, WeightPlan, WeightShard


class Store:
    """The members' rendezvous, on torch's own store."""

    def __init__(self, store: dist.TCPStore, scope: str) -> None:
        self._store = dist.PrefixStore(scope, store)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)


class TrainerRank:
    """fp32 master weights in the rows that FSDP2 assigns to this rank."""

    def __init__(
        self, specs: Sequence[TensorSpec], shards: Sequence[WeightShard], device: torch.device
    ) -> None:
        self._specs = specs
        self.shards = shards
        self.rows = {
            specs[s.tensor].name: torch.empty(
                (s.stop - s.start, *specs[s.tensor].shape[1:]), dtype=torch.float32, device=device
            )
            for s in shards
        }

    def change(self, version: int) -> None:
        """Sets new random weights; every rank draws the same whole tensors."""
        for s in self.shards:
            spec = self._specs[s.tensor]
            whole = random_tensor(spec, version, s.tensor, self.rows[spec.name].device)
            self.rows[spec.name].copy_(whole[s.start : s.stop])

    def weight_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.rows.items()

    def score_canary(self) -> Canary:
        raise NotImplementedError("there is no controller here that would ask")


class Rollout:
    """Live parameters as an inference engine keeps them: qkv and gate_up fused."""

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self._device = device
        sizes: dict[str, int] = {}
        places: list[tuple[TensorSpec, str, int]] = []
        for spec in specs:
            name = fused_name(spec.name)
            places.append((spec, name, sizes.get(name, 0)))
            sizes[name] = sizes.get(name, 0) + spec.num_rows
        dtype = getattr(torch, specs[0].dtype)
        shapes = {fused_name(spec.name): spec.shape[1:] for spec in specs}
        self.live = {
            name: torch.zeros((rows, *shapes[name]), dtype=dtype, device=device)
            for name, rows in sizes.items()
        }
        self._views = {
            spec.name: self.live[name][start : start + spec.num_rows]
            for spec, name, start in places
        }

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Copies into the live parameters, whose addresses stay the same."""
        synchronize(self._device)
        begin = time.perf_counter()
        copy_all(list(self._views.values()), [tensors[name] for name in self._views])
        synchronize(self._device)
        return time.perf_counter() - begin

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        raise NotImplementedError("there is no controller here that would ask")

    async def refuse_weights(self, reason: str) -> None:
        raise NotImplementedError("there is no controller here that would ask")

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Receives into the sent tensors, which are views into the fused ones."""
        return live_placer(plan, self._views)

    async def adopt_placed(self, version: int) -> float:
        """Adopts the received weights."""
        return await self.adopt_weights(version, self._views)

    async def close_weights(self) -> None:
        """Does nothing: no generation is paused here."""

    def differs_from(self, specs: Sequence[TensorSpec], version: int) -> list[str]:
        """Returns the tensors that differ in any bit from the trainer's, cast to the transfer's dtype."""
        return [
            spec.name
            for index, spec in enumerate(specs)
            if not torch.equal(
                self._views[spec.name],
                random_tensor(spec, version, index, self._device).to(self._views[spec.name].dtype),
            )
        ]


def random_tensor(spec: TensorSpec, version: int, index: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(version * 10_000 + index)
    return torch.randn(spec.shape, generator=generator, device=device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raw_broadcast(channel: Channel, buffer: Tensor) -> None:
    """Sends all bytes in one collective: the limit."""
    channel.broadcast(buffer).wait()


def broadcast_each(channel: Channel, tensors: Sequence[Tensor]) -> None:
    """Sends one collective per parameter, all started before any is waited for."""
    works = [channel.broadcast(tensor) for tensor in tensors]
    for work in works:
        work.wait()


def broadcast_packed(
    channel: Channel, tensors: Sequence[Tensor], *, is_source: bool, bucket_bytes: int
) -> None:
    """Broadcasts buckets made by ``torch.cat`` and splits them: the usual transport of engines."""
    bucket: list[Tensor] = []
    size = 0
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size < bucket_bytes and index + 1 < len(tensors):
            continue
        flat = (
            torch.cat([t.flatten() for t in bucket])
            if is_source
            else torch.empty(
                sum(t.numel() for t in bucket), dtype=tensor.dtype, device=tensor.device
            )
        )
        channel.broadcast(flat).wait()
        if not is_source:
            for target, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                target.copy_(values.view_as(target))
        bucket, size = [], 0
