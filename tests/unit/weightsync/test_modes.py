"""Tests that every mode transfers weights exactly, and detects injected errors before adoption."""

import pytest
import torch

from services.common.errors import DataLossError, FailedPreconditionError, ServiceError
from services.extras.weight_modes.delta import _place_dtype, update_arena
from services.weightsync import arena, transfer
from services.weightsync.arena import WeightArena
from services.weightsync.group import Channel
from services.weightsync.modes import staged
from services.weightsync.modes.base import pack_weights
from services.weightsync.modes.placing import live_placer, whole_buffers
from services.weightsync.weight_plan import TensorSpec, make_plan, row_shards, version_digest
from tests.helpers.weight_members import Cluster, Sink

MODES = ["shadow", "inplace", "cpu_async", "delta", "offloaded"]


@pytest.mark.parametrize("num_sources", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
async def test_every_version_arrives_bit_by_bit(mode, num_sources):
    cluster = Cluster(num_sources, mode)
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"][version * 100, 3] = version
        cluster.weights["norm"][version] = 0.5 + version
        await cluster.publish(version)
        assert cluster.serves_what_was_sent()
        assert not any(sink.is_paused for sink in cluster.sinks)


async def test_checksums_are_added_to_zeros_at_every_version(monkeypatch):
    def add_checksum(bucket, sums, *, alone=False):  # adds to sums, as the GPU kernel does
        sums[0] += int(bucket.long().sum())
        sums[1] += int((bucket.long() * torch.arange(len(bucket))).sum())

    for module in (arena, transfer, staged):
        monkeypatch.setattr(module, "write_checksum", add_checksum)
    cluster = Cluster(2, "shadow")
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"].add_(1)
        await cluster.publish(version)
        assert cluster.serves_what_was_sent()


class Injection:
    """Damages the tensors that a source sends, but not the receivers' channels."""

    def __init__(self, kind):
        self.kind = kind
        self.sent = []

    def broadcast(self, honest, channel, tensor):
        if tensor.numel() < 1024:
            return honest(channel, tensor)
        self.sent.append(tensor)
        number = len(self.sent) - 1
        if self.kind == "flip" and number == 1:
            tensor = tensor.clone()
            tensor.view(torch.uint8)[700] ^= 1
        elif self.kind == "skip" and number == 1:
            tensor = torch.zeros_like(tensor)
        elif self.kind == "order" and number in (0, 1):
            tensor = tensor.clone()
            other = self.sent[0] if number == 1 else tensor.roll(8)
            tensor[: other.numel()] = other[: tensor.numel()]
        return honest(channel, tensor)


@pytest.mark.parametrize("kind", ["flip", "skip", "order"])
@pytest.mark.parametrize("mode", MODES)
async def test_injected_code_is_found_before_the_first_token(monkeypatch, mode, kind):
    cluster = Cluster(1, mode)
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"].add_(1)
    injection, honest = Injection(kind), Channel.broadcast
    source_channel = next(iter(cluster.senders[0]._epochs.group(1).channels.values()))

    def broadcast(channel, tensor):
        if channel is source_channel:
            return injection.broadcast(honest, channel, tensor)
        return honest(channel, tensor)

    monkeypatch.setattr(Channel, "broadcast", broadcast)
    await cluster.prepare(1)
    results = await cluster.transfer(1)
    assert all(isinstance(result, DataLossError) for result in results[1:])
    for receiver, sink in zip(cluster.receivers, cluster.sinks, strict=True):
        with pytest.raises(FailedPreconditionError, match="not staged"):
            await receiver.adopt(1, "x")
        assert sink.version == 0
        # In-place weights are partly overwritten, so the engine remains paused.
        assert sink.is_paused == (mode == "inplace")
        assert bool(sink.refused) == (mode == "inplace")
    monkeypatch.undo()
    await cluster.form_group(epoch=2)
    await cluster.publish(1, epoch=2)
    assert cluster.serves_what_was_sent()
    assert not any(sink.is_paused for sink in cluster.sinks)


@pytest.mark.parametrize("number", [0, 1], ids=["place", "word"])
async def test_a_damaged_change_of_a_delta_is_found(monkeypatch, number):
    cluster = Cluster(1, "delta", timeout_s=1)
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"][7] = 7
    honest = Channel.broadcast
    source_channel = next(iter(cluster.senders[0]._epochs.group(1).channels.values()))
    broadcasts = []

    def broadcast(channel, tensor):
        if channel is source_channel and tensor.dtype == torch.int32:
            broadcasts.append(tensor)
            if len(broadcasts) == number + 1:
                tensor = tensor.clone()
                tensor[0] ^= 1 << 20
        return honest(channel, tensor)

    await cluster.prepare(1)
    monkeypatch.setattr(Channel, "broadcast", broadcast)
    results = await cluster.transfer(1, base_version=0)
    assert all(isinstance(result, DataLossError) for result in results[1:])
    assert [sink.version for sink in cluster.sinks] == [0, 0]


async def test_a_delta_is_much_smaller_than_everything_when_little_changed():
    cluster = Cluster(1, "delta")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"][5] = 1
    await cluster.prepare(1)
    assert cluster.held_versions == [0, 0, 0]
    reports = await cluster.transfer(1, base_version=0)
    assert reports[0].num_bytes == 16 * 8


async def test_a_delta_from_another_version_is_rejected():
    cluster = Cluster(1, "delta", timeout_s=1)
    await cluster.form_group()
    await cluster.publish(0)
    cluster.receivers[1]._receiver.held_version = -1
    cluster.weights["embed"].add_(1)
    await cluster.prepare(1)
    assert -1 in cluster.held_versions
    results = await cluster.transfer(1, base_version=0)
    assert isinstance(results[2], DataLossError)
    assert "delta" in str(results[2])


async def test_an_aborted_inplace_transfer_keeps_the_old_weights():
    cluster = Cluster(1, "inplace")
    await cluster.form_group()
    await cluster.publish(0)
    await cluster.prepare(1)
    assert all(sink.is_paused for sink in cluster.sinks)
    for receiver in cluster.receivers:
        await receiver.abort(1, "the trainer is gone")
    assert not any(sink.is_paused for sink in cluster.sinks)


async def test_a_version_in_place_that_was_not_adopted_is_not_served_under_the_old_number():
    cluster = Cluster(1, "inplace")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"].add_(1)
    await cluster.send(1)
    for receiver in cluster.receivers:
        await receiver.abort(1, "another rollout is gone")
    assert all(sink.is_paused and sink.version == 0 for sink in cluster.sinks)
    await cluster.form_group(epoch=2)
    await cluster.publish(1, epoch=2)
    assert cluster.serves_what_was_sent()
    assert not any(sink.is_paused for sink in cluster.sinks)


async def test_weights_of_another_type_are_not_received_in_place(monkeypatch):
    cluster = Cluster(1, "inplace")
    await cluster.form_group()

    async def open_weights(sink, plan, slots):
        return live_placer(plan, {name: tensor.half() for name, tensor in sink.live.items()})

    monkeypatch.setattr(Sink, "open_weights", open_weights)
    with pytest.raises(ValueError, match="float16"):
        await cluster.receivers[0].prepare(1, 0, cluster.plan_hash)


def test_an_unknown_mode_is_rejected():
    with pytest.raises((ValueError, ServiceError), match="mode"):
        Cluster(1, "carrier-pigeon").agree()


@pytest.mark.parametrize("mode", ["shadow", "cpu_async"])
async def test_rows_of_several_sources_arrive_in_one_copy_of_the_weights(mode):
    cluster = Cluster(3, mode)
    await cluster.form_group()
    await cluster.publish(0)
    (sink, *_) = cluster.sinks
    size = sum(tensor.nbytes for tensor in cluster.weights.values())
    storages = {tensor.untyped_storage() for tensor in sink.adopted.values()}
    assert len({storage.data_ptr() for storage in storages}) == 1
    assert size <= next(iter(storages)).nbytes() <= size + 256 * len(cluster.weights)


def test_a_shadow_is_divided_among_the_engines_devices_in_whole_tensors():
    specs = [TensorSpec(f"layer{index}", (100 + index, 30), "bfloat16") for index in range(9)]
    plan = make_plan(specs, 1 << 16, row_shards(specs, 1))
    devices = [torch.device("cpu"), torch.device("meta")]
    flat, tensors = whole_buffers(plan, devices)
    sizes = {device.type: 0 for device in devices}
    for tensor in tensors.values():
        sizes[tensor.device.type] += tensor.nbytes
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert all(sizes.values())
    assert max(sizes.values()) <= sum(sizes.values()) / 2 + largest
    assert [buffer.nbytes for buffer in flat] == [tensors[spec.name].nbytes for spec in specs]


class Source:
    """Source of a trainer's tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def weight_tensors(self):
        yield from self.tensors.items()


SIZES = [1, 3, 1000, (1 << 19) - 1, 1 << 19, (1 << 20) + 17]


@pytest.mark.parametrize("size", SIZES)
def test_changed_places_are_those_of_a_comparison_of_all_words(size):
    specs = [TensorSpec("first", (size,), "bfloat16"), TensorSpec("second", (8, 3), "float32")]
    now = WeightArena(make_plan(specs, 1 << 20), torch.device("cpu"), source=0)
    tensors = {"second": torch.randn(8, 3), "first": torch.randn(size)}
    pack_weights(Source(tensors), now)
    assert update_arena(Source(tensors), now).tolist() == []
    before = now.buffers[0].view(torch.int32).clone()
    tensors["second"][3, 1] = 7
    tensors["first"][torch.randint(size, (size // 50 + 1,))] += 1
    places = update_arena(Source(tensors), now)
    words = now.buffers[0].view(torch.int32)
    assert places.dtype == torch.int32
    assert torch.equal(places.long(), (words != before).nonzero().flatten())
    packed = WeightArena(now.plan, torch.device("cpu"), source=0)
    pack_weights(Source(tensors), packed)
    assert torch.equal(words, packed.buffers[0].view(torch.int32))


def test_so_many_changes_that_everything_is_sent_have_no_places():
    specs = [TensorSpec(name, (100, 90), "float32") for name in ("first", "second")]
    now = WeightArena(make_plan(specs, 1 << 20), torch.device("cpu"), source=0)
    tensors = {name: torch.randn(100, 90) for name in ("first", "second")}
    pack_weights(Source(tensors), now)
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    assert update_arena(Source(tensors), now) is None
    assert all(torch.equal(view, tensors[name]) for name, _, view in now.pieces(0))


async def test_a_delta_has_the_changes_of_versions_that_were_packed_and_not_sent():
    cluster = Cluster(1, "delta")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"][5] = 1
    await cluster.prepare(1)
    cluster.weights["embed"][7] = 1
    await cluster.prepare(2)
    reports = await cluster.transfer(2, base_version=0)
    assert reports[0].num_bytes == 2 * 16 * 8
    for receiver in cluster.receivers:
        await receiver.adopt(2, version_digest(reports[0].digests))
    assert cluster.serves_what_was_sent()


async def test_a_version_whose_packing_failed_leaves_no_changes_out():
    cluster = Cluster(1, "delta")
    await cluster.form_group()
    await cluster.publish(0)
    cluster.weights["embed"][5] = 1
    norm = cluster.weights.pop("norm")
    with pytest.raises(KeyError, match="norm"):
        await cluster.prepare(1)
    cluster.weights["norm"] = norm
    await cluster.prepare(2)
    reports = await cluster.transfer(2, base_version=0)
    for receiver in cluster.receivers:
        await receiver.adopt(2, version_digest(reports[0].digests))
    assert cluster.serves_what_was_sent()


def test_places_have_8_bytes_only_if_4_are_too_few():
    assert _place_dtype(torch.empty((1 << 31) - 1, dtype=torch.int32, device="meta")) == torch.int32
    assert _place_dtype(torch.empty(1 << 31, dtype=torch.int32, device="meta")) == torch.int64
