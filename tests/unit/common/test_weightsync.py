"""Weight sessions between one sender and two receivers, over Gloo on loopback."""

import asyncio
import threading

import pytest
import torch

from services.common.errors import DataLossError, FailedPreconditionError
from services.common.weightsync.arena import WeightArena
from services.common.weightsync.member import WeightMember
from services.common.weightsync.plan import ALIGNMENT, TensorSpec, make_plan

SPECS = (
    TensorSpec("embed", (33, 16), "float32"),
    TensorSpec("norm", (16,), "bfloat16"),
    TensorSpec("scale", (), "float64"),
)


class MemoryStore:
    """A key-value store for members in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise RuntimeError(f"{key} was not set in {timeout_s} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            self._changed.notify_all()
            return value


class Source:
    def __init__(self) -> None:
        self.weights = {
            spec.name: torch.randn(spec.shape, dtype=torch.float64).to(getattr(torch, spec.dtype))
            for spec in SPECS
        }

    def weight_specs(self):
        return SPECS

    def weight_tensors(self):
        return self.weights.items()


class Sink:
    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.version = -1

    async def adopt_weights(self, version, tensors):
        self.live = {name: tensor.clone() for name, tensor in tensors.items()}
        self.version = version
        return 0.001


def make_members():
    stores: dict[str, MemoryStore] = {}
    source, sinks = Source(), [Sink(), Sink()]
    members = [
        WeightMember(
            source=source if sink is None else None,
            sink=sink,
            device=torch.device("cpu"),
            host="127.0.0.1",
            rendezvous=lambda scope: stores.setdefault(scope, MemoryStore()),
        )
        for sink in (None, *sinks)
    ]
    return source, sinks, members


async def form(members, epoch=1):
    hashes = {member.agree_plan(SPECS, 512) for member in members}
    await asyncio.gather(
        *(
            member.form(
                epoch,
                rank=rank,
                world_size=len(members),
                backend="gloo",
                scope=f"run/{epoch}",
                timeout_s=10,
            )
            for rank, member in enumerate(members)
        )
    )
    (plan_hash,) = hashes
    return plan_hash


async def transfer(members, plan_hash, version, epoch=1):
    await asyncio.gather(*(member.prepare(epoch, version, plan_hash) for member in members))
    return await asyncio.gather(*(member.transfer(epoch, version, 10) for member in members))


async def test_every_receiver_adopts_exactly_what_was_sent():
    source, sinks, members = make_members()
    plan_hash = await form(members)
    for version in (0, 1):
        source.weights["embed"].add_(version)
        reports = await transfer(members, plan_hash, version)
        assert len({report.digest for report in reports}) == 1
        for member in members[1:]:
            await member.adopt(version, reports[0].digest)
        for sink in sinks:
            assert sink.version == version
            for name, tensor in source.weights.items():
                assert torch.equal(sink.live[name], tensor)


async def test_live_weights_stay_until_the_sender_digest_is_confirmed():
    _, sinks, members = make_members()
    plan_hash = await form(members)
    await transfer(members, plan_hash, 0)
    with pytest.raises(DataLossError, match="digest"):
        await members[1].adopt(0, "0" * 64)
    assert sinks[0].version == -1


async def test_adopting_a_version_twice_changes_nothing():
    _, sinks, members = make_members()
    plan_hash = await form(members)
    reports = await transfer(members, plan_hash, 0)
    await members[1].adopt(0, reports[0].digest)
    sinks[0].live = {}
    await members[1].adopt(0, reports[0].digest)
    assert sinks[0].live == {}


async def test_versions_only_grow():
    _, _, members = make_members()
    plan_hash = await form(members)
    reports = await transfer(members, plan_hash, 3)
    await members[1].adopt(3, reports[0].digest)
    with pytest.raises(FailedPreconditionError, match="only grow"):
        await members[1].prepare(1, 3, plan_hash)


async def test_an_older_epoch_is_refused():
    _, _, members = make_members()
    await form(members, epoch=2)
    with pytest.raises(FailedPreconditionError, match="epoch"):
        await members[0].prepare(1, 0, "x")
    with pytest.raises(FailedPreconditionError, match="epoch must grow"):
        await members[0].form(2, rank=0, world_size=1, backend="gloo", scope="s", timeout_s=1)


async def test_a_group_is_built_again_after_an_abort():
    source, sinks, members = make_members()
    await form(members)
    for member in members:
        member.abort(1, "test")
    survivors = members[:2]
    plan_hash = await form(survivors, epoch=2)
    reports = await transfer(survivors, plan_hash, 5, epoch=2)
    await members[1].adopt(5, reports[0].digest)
    assert torch.equal(sinks[0].live["embed"], source.weights["embed"])


async def test_a_flipped_bit_is_found_before_adoption(monkeypatch):
    _, sinks, members = make_members()
    plan_hash = await form(members)
    honest = WeightArena.checksums

    def flip_then_check(arena):
        if arena is members[1]._arena:
            arena.buffer[700] ^= 1
        return honest(arena)

    monkeypatch.setattr(WeightArena, "checksums", flip_then_check)
    await asyncio.gather(*(member.prepare(1, 0, plan_hash) for member in members))
    results = await asyncio.gather(
        *(member.transfer(1, 0, 10) for member in members), return_exceptions=True
    )
    assert isinstance(results[1], DataLossError)
    assert not isinstance(results[2], BaseException)
    assert sinks[0].version == -1


def test_checksum_sees_swapped_words():
    arena = WeightArena(make_plan(SPECS, 1 << 16), torch.device("cpu"))
    arena.tensors["embed"].copy_(torch.randn(33, 16))
    before = arena.checksums()
    words = arena.buffer.view(torch.int64)
    words[[0, 1]] = words[[1, 0]]
    assert not torch.equal(arena.checksums(), before)


def test_plan_covers_the_arena_with_aligned_buckets():
    plan = make_plan(SPECS, 1000)
    assert [bucket.start for bucket in plan.buckets] == list(range(0, plan.arena_bytes, 768))
    assert plan.buckets[-1].stop == plan.arena_bytes
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "at least one tensor"),
        ((SPECS[0], SPECS[0]), "twice"),
        ((TensorSpec("a", (1,), "complex64"),), "element types"),
    ],
)
def test_bad_tensor_lists_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tensors, 1 << 20)


def test_plan_hash_differs_with_order_shape_dtype_and_buckets():
    plans = {
        make_plan(tensors, size).plan_hash
        for tensors, size in (
            (SPECS, 1 << 16),
            (SPECS[::-1], 1 << 16),
            (SPECS, 1 << 17),
            ((TensorSpec("embed", (16, 33), "float32"), *SPECS[1:]), 1 << 16),
        )
    }
    assert len(plans) == 4
