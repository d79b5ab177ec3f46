"""Tests of weight sessions between senders and two receivers, over Gloo on loopback."""

import math
from dataclasses import replace

import pytest

from services.common.errors import DataLossError, FailedPreconditionError, UnavailableError
from services.weightsync.member import SUPERSEDED
from services.weightsync.weight_plan import version_digest
from tests.helpers.weight_members import Cluster, MemoryStore


async def test_every_receiver_has_exactly_the_sent_weights():
    cluster = Cluster()
    await cluster.form_group()
    for version in (0, 1):
        cluster.weights["embed"].add_(version)
        assert len(await cluster.publish(version)) == 64
        assert cluster.serves_what_was_sent()
    assert cluster.ready == [0, 0, 1, 1]


async def test_live_weights_stay_until_the_sender_digest_is_confirmed():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.prepare(0)
    await cluster.transfer(0)
    with pytest.raises(DataLossError, match="digest"):
        await cluster.receivers[0].adopt(0, "0" * 64)
    assert cluster.sinks[0].version == -1


async def test_adopting_a_version_twice_changes_nothing():
    cluster = Cluster()
    await cluster.form_group()
    digest = await cluster.publish(0)
    await cluster.receivers[0].adopt(0, digest)
    assert cluster.sinks[0].num_adoptions == 1


async def test_an_older_version_is_rejected():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.publish(3)
    with pytest.raises(FailedPreconditionError, match="version"):
        await cluster.receivers[0].prepare(1, 2, cluster.plan_hash)


async def test_an_older_epoch_is_rejected():
    cluster = Cluster()
    await cluster.form_group(epoch=2)
    with pytest.raises(FailedPreconditionError, match="epoch"):
        await cluster.senders[0].prepare(1, 0, "x")
    with pytest.raises(FailedPreconditionError, match="epoch"):
        await cluster.senders[0].form_group(
            2, receiver=0, num_receivers=1, backend="gloo", scope="s", timeout_s=1
        )


async def test_a_group_is_built_again_without_a_lost_member():
    cluster = Cluster()
    await cluster.form_group()
    for member in cluster.members:
        await member.abort(1, "test")
    cluster.receivers.pop()
    cluster.sinks.pop()
    await cluster.form_group(epoch=2)
    await cluster.publish(5, epoch=2)
    assert cluster.serves_what_was_sent()


async def test_a_version_is_resent_from_its_copy_during_training():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.publish(0)
    published = {name: tensor.clone() for name, tensor in cluster.weights.items()}
    cluster.weights["embed"].add_(1)  # the update of the next step
    await cluster.prepare(0)
    reports = await cluster.transfer(0)
    await cluster.receivers[0].adopt(0, version_digest(reports[0].digests))
    assert cluster.sources[0].num_reads == 1
    assert cluster.sinks[0].live["embed"].equal(published["embed"])


async def test_a_version_that_was_never_adopted_is_superseded_by_the_next_and_counted():
    cluster = Cluster()
    before = SUPERSEDED._value.get()
    await cluster.form_group()
    await cluster.prepare(0)
    await cluster.transfer(0)
    cluster.weights["embed"].add_(1)
    await cluster.publish(1)
    assert [sink.num_adoptions for sink in cluster.sinks] == [1, 1]
    assert cluster.serves_what_was_sent()
    assert SUPERSEDED._value.get() == before + len(cluster.receivers)
    await cluster.publish(2)
    assert SUPERSEDED._value.get() == before + len(cluster.receivers)


async def test_a_transfer_over_an_aborted_group_is_not_staged():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.prepare(0)
    await cluster.receivers[0].abort(1, "test")
    with pytest.raises(FailedPreconditionError):
        await cluster.receivers[0].adopt(0, "x")


async def test_a_member_that_the_others_wait_for_in_vain_is_named_unavailable(monkeypatch):
    cluster, get = Cluster(), MemoryStore.get
    monkeypatch.setattr(MemoryStore, "get", lambda store, key, _: get(store, key, 0.1))
    cluster.agree()
    with pytest.raises(UnavailableError, match="not formed"):
        await cluster.receivers[0].form_group(
            1, receiver=0, num_receivers=2, backend="gloo", scope="s", timeout_s=20
        )


async def test_a_rollout_whose_canary_differs_is_not_ready_and_serves_nothing():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.prepare(0)
    reports = await cluster.transfer(0)
    receiver, sink = cluster.receivers[0], cluster.sinks[0]
    await receiver.adopt(0, version_digest(reports[0].digests))
    sink.live["norm"].add_(1)  # as if the engine had written a tensor to a wrong position
    with pytest.raises(DataLossError, match="canary"):
        await receiver.check(0, await cluster.senders[0].score(), 1e-3)
    assert sink.is_paused
    assert cluster.ready == []
    await cluster.publish(0)
    assert not sink.is_paused
    assert cluster.ready == [0, 0]


async def test_weights_that_diverged_are_not_blamed_on_the_transfer():
    cluster = Cluster()
    await cluster.form_group()
    await cluster.publish(0)
    canary = await cluster.senders[0].score()
    diverged = replace(canary, logprobs=(math.nan,) * len(canary.logprobs))
    with pytest.raises(DataLossError, match=r"trainer\.optimizer\.learning_rate"):
        await cluster.receivers[0].check(0, diverged, 1e-3)
    assert cluster.sinks[0].is_paused
