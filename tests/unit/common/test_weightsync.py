"""Weight sessions between one sender and two receivers, over Gloo on loopback."""

import asyncio
import threading

import pytest
import torch

from services.common.errors import DataLossError, FailedPreconditionError
from services.common.weightsync.arena import WeightArena
from services.common.weightsync.member import WeightMember
from services.common.weightsync.plan import (
    ALIGNMENT,
    Shard,
    TensorSpec,
    fsdp_shards,
    make_plan,
    version_digest,
)

SPECS = (
    TensorSpec("embed", (333, 16), "float32"),
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
    """A trainer rank that holds its FSDP2 rows of the same weights as all other ranks."""

    def __init__(self, number=0, num_sources=1, weights=None) -> None:
        self.shards = fsdp_shards(SPECS, num_sources)[number]
        self.weights = weights or {
            spec.name: torch.randn(spec.shape, dtype=torch.float64).to(getattr(torch, spec.dtype))
            for spec in SPECS
        }

    def weight_specs(self):
        return SPECS

    def weight_tensors(self):
        for shard in self.shards:
            name = SPECS[shard.tensor].name
            whole = self.weights[name]
            yield name, whole[shard.start : shard.stop] if whole.dim() else whole


class Sink:
    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.version = -1

    async def adopt_weights(self, version, tensors):
        self.live = {name: tensor.clone() for name, tensor in tensors.items()}
        self.version = version
        return 0.001


def make_members(num_sources=1):
    stores: dict[str, MemoryStore] = {}
    source, sinks = Source(0, num_sources), [Sink(), Sink()]
    sources = [
        source,
        *(Source(number, num_sources, source.weights) for number in range(1, num_sources)),
    ]
    members = [
        WeightMember(
            source=sender,
            sink=sink,
            device=torch.device("cpu"),
            host="127.0.0.1",
            rendezvous=lambda scope: stores.setdefault(scope, MemoryStore()),
        )
        for sender, sink in [(sender, None) for sender in sources]
        + [(None, sink) for sink in sinks]
    ]
    return source, sinks, members


def agree(members, num_sources):
    (plan_hash,) = {
        member.agree_plan(
            SPECS, 8192, num_sources=num_sources, source=number if number < num_sources else None
        )
        for number, member in enumerate(members)
    }
    return plan_hash


async def form(members, epoch=1, num_sources=1):
    plan_hash = agree(members, num_sources)
    num_receivers = len(members) - num_sources
    await asyncio.gather(
        *(
            member.form(
                epoch,
                receiver=max(number - num_sources, 0),
                num_receivers=num_receivers,
                backend="gloo",
                scope=f"run/{epoch}",
                timeout_s=10,
            )
            for number, member in enumerate(members)
        )
    )
    return plan_hash


async def transfer(members, plan_hash, version, epoch=1):
    await asyncio.gather(*(member.prepare(epoch, version, plan_hash) for member in members))
    return await asyncio.gather(*(member.transfer(epoch, version, 10) for member in members))


async def adopt_everywhere(members, plan_hash, version, *, num_sources=1, epoch=1):
    """Send, and adopt under the digest that the sources report."""
    reports = await transfer(members, plan_hash, version, epoch)
    sent = [digest for report in reports[:num_sources] for digest in report.digests]
    assert all(list(report.digests) == sent for report in reports[num_sources:])
    digest = version_digest(sent)
    for member in members[num_sources:]:
        await member.adopt(version, digest)
    return digest


@pytest.mark.parametrize("num_sources", [1, 2, 3])
async def test_every_receiver_adopts_exactly_what_was_sent(num_sources):
    source, sinks, members = make_members(num_sources)
    plan_hash = await form(members, num_sources=num_sources)
    for version in (0, 1):
        source.weights["embed"].add_(version)
        digest = await adopt_everywhere(members, plan_hash, version, num_sources=num_sources)
        assert len(digest) == 64
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
    await members[1].adopt(0, version_digest(reports[0].digests))
    sinks[0].live = {}
    await members[1].adopt(0, version_digest(reports[0].digests))
    assert sinks[0].live == {}


async def test_versions_only_grow():
    _, _, members = make_members()
    plan_hash = await form(members)
    reports = await transfer(members, plan_hash, 3)
    await members[1].adopt(3, version_digest(reports[0].digests))
    with pytest.raises(FailedPreconditionError, match="only grow"):
        await members[1].prepare(1, 2, plan_hash)


async def test_an_older_epoch_is_refused():
    _, _, members = make_members()
    await form(members, epoch=2)
    with pytest.raises(FailedPreconditionError, match="epoch"):
        await members[0].prepare(1, 0, "x")
    with pytest.raises(FailedPreconditionError, match="epoch must grow"):
        await members[0].form(
            2, receiver=0, num_receivers=1, backend="gloo", scope="s", timeout_s=1
        )


async def test_a_group_is_built_again_after_an_abort():
    source, sinks, members = make_members()
    await form(members)
    for member in members:
        member.abort(1, "test")
    survivors = members[:2]
    plan_hash = await form(survivors, epoch=2)
    reports = await transfer(survivors, plan_hash, 5, epoch=2)
    await members[1].adopt(5, version_digest(reports[0].digests))
    assert torch.equal(sinks[0].live["embed"], source.weights["embed"])


async def test_a_flipped_bit_is_found_before_adoption(monkeypatch):
    _, sinks, members = make_members()
    plan_hash = await form(members)
    honest = WeightArena.checksum

    def flip_then_check(arena, source, index):
        if arena is members[1]._arena and index == 0:
            arena.buffers[0][700] ^= 1
        return honest(arena, source, index)

    monkeypatch.setattr(WeightArena, "checksum", flip_then_check)
    await asyncio.gather(*(member.prepare(1, 0, plan_hash) for member in members))
    results = await asyncio.gather(
        *(member.transfer(1, 0, 10) for member in members), return_exceptions=True
    )
    assert isinstance(results[1], DataLossError)
    assert not isinstance(results[2], BaseException)
    assert sinks[0].version == -1


def test_checksum_sees_any_changed_and_any_swapped_words():
    arena = WeightArena(make_plan(SPECS, 1 << 16), torch.device("cpu"))
    embed = next(view for name, _, view in arena.pieces(0) if name == "embed")
    embed.copy_(torch.randn(333, 16))
    words = arena.buffers[0].view(torch.int64)
    before = arena.checksums(0)
    for first, second in ((0, 1), (0, 1024), (3, 2050)):
        words[[first, second]] = words[[second, first]]
        assert not torch.equal(arena.checksums(0), before)
        words[[first, second]] = words[[second, first]]
    assert torch.equal(arena.checksums(0), before)
    for bit in (0, 31, 63):
        words[1500] ^= -(1 << 63) if bit == 63 else 1 << bit
        assert not torch.equal(arena.checksums(0), before)
        words[1500] ^= -(1 << 63) if bit == 63 else 1 << bit


def test_buckets_cover_each_arena():
    plan = make_plan(SPECS, 10_000, fsdp_shards(SPECS, 2))
    for source in plan.sources:
        assert [bucket.start for bucket in source.buckets] == list(
            range(0, source.arena_bytes, 8192)
        )
        assert source.buckets[-1].stop == source.arena_bytes
        assert all(offset % ALIGNMENT == 0 for offset in source.offsets)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 400])
def test_fsdp_shards_cover_every_row_once(num_ranks):
    shards = fsdp_shards(SPECS, num_ranks)
    rows = [
        (shard.tensor, row)
        for rank in shards
        for shard in rank
        for row in range(shard.start, shard.stop)
    ]
    assert len(rows) == len(set(rows)) == sum(spec.num_rows for spec in SPECS)


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


@pytest.mark.parametrize(
    "shards",
    [
        [[Shard(0, 0, 333), Shard(1, 0, 16)]],
        [[Shard(0, 0, 333), Shard(1, 0, 16), Shard(2, 0, 1), Shard(0, 5, 6)]],
        [[Shard(0, 0, 300), Shard(1, 0, 16), Shard(2, 0, 1)], [Shard(0, 301, 333)]],
    ],
    ids=["a tensor is missing", "a row twice", "a row missing"],
)
def test_shards_must_cover_every_row_once(shards):
    with pytest.raises(ValueError, match="exactly once"):
        make_plan(SPECS, 1 << 20, shards)


def test_plan_hash_differs_with_order_shape_dtype_shards_and_buckets():
    plans = {
        make_plan(tensors, size, shards).plan_hash
        for tensors, size, shards in (
            (SPECS, 1 << 16, None),
            (SPECS, 1 << 16, fsdp_shards(SPECS, 2)),
            (SPECS[::-1], 1 << 16, None),
            (SPECS, 1 << 17, None),
            ((TensorSpec("embed", (16, 333), "float32"), *SPECS[1:]), 1 << 16, None),
        )
    }
    assert len(plans) == 5
