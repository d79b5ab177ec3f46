"""Weight sessions over real processes: lost rollouts do not block others, and torn weights never serve."""

import asyncio
import signal
from functools import partial

import pytest

from services.common.errors import FailedPreconditionError, UnavailableError
from tests.helpers.weight_member import Fall
from tests.helpers.weight_session import open_session, session_of

pytestmark = pytest.mark.timeout(240)

NUM_BYTES, BUCKET_BYTES = 4 << 20, 1 << 18
NUM_BUCKETS = NUM_BYTES // BUCKET_BYTES
# Long, so that a live member on a busy machine does not count as lost; the benchmark measures recovery.
PATIENT = {
    "bucket_bytes": BUCKET_BYTES,
    "answer_timeout_s": 3.0,
    "transfer_timeout_s": 30.0,
}
MEMBERS = {"num_bytes": NUM_BYTES, "patience_s": 3.0}
SIGNALS = pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)

# The session waits for a stopped member, several times in a test.
SLOW_IF_STOPPED = pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)],
    ids=["killed", "stopped"],
)


async def test_all_rollouts_serve_the_same_verified_version():
    async with session_of("trainer", "rollout-0", "rollout-1", **MEMBERS, **PATIENT) as (
        session,
        members,
        _,
    ):
        for version in range(3):
            report = await session.publish(partial(int, version))
            served_versions = {await members[name].serves() for name in ("rollout-0", "rollout-1")}
            assert len(served_versions) == 1
            assert served_versions.pop()[0] == version
            assert report.lost == ()


@SIGNALS
@pytest.mark.parametrize("moment", ["before", "transfer", "adopt"])
async def test_the_others_serve_the_new_version_when_a_rollout_is_lost(how, moment):
    fall = {
        "before": None,
        "transfer": Fall(how, bucket=NUM_BUCKETS + NUM_BUCKETS // 2),
        "adopt": Fall(how, version=1),
    }[moment]
    names = ("trainer", "rollout-0", "rollout-1")
    falls = {"rollout-0": fall}
    async with session_of(*names, falls=falls, **MEMBERS, **PATIENT) as parts:
        session, members, _ = parts
        await session.publish(partial(int, 0))
        assert (await members["rollout-1"].serves())[0] == 0
        if moment == "before":
            members["rollout-0"].send_signal(how)
        report = await session.publish(partial(int, 1))
        assert report.version == 1
        assert report.lost == ("rollout-0",)
        digest = await members["rollout-1"].serves_version(1)
        assert (await session.publish(partial(int, 2))).lost == ()
        assert await members["rollout-1"].serves_version(2) != digest


async def test_rollouts_keep_their_version_when_the_trainer_dies():
    async with session_of("trainer", "rollout-0", **MEMBERS, **PATIENT) as (
        session,
        members,
        _,
    ):
        await session.publish(partial(int, 0))
        assert (await members["rollout-0"].serves())[0] == 0
        members["trainer"].send_signal(signal.SIGKILL)
        with pytest.raises(UnavailableError, match="trainer"):
            await session.publish(partial(int, 1))
        with pytest.raises(TimeoutError):
            await members["rollout-0"].serves(timeout_s=0.3)


async def test_a_rollout_that_comes_later_gets_the_version_that_is_served():
    async with session_of("trainer", "rollout-0", **MEMBERS, **PATIENT) as (
        session,
        members,
        started,
    ):
        await session.publish(partial(int, 0))
        version, digest = await members["rollout-0"].serves()
        late = started.start("rollout-1")
        await late.started()
        members["rollout-1"] = late
        later_session = await open_session(members, attempt=2, **PATIENT)
        await later_session.publish(partial(int, 0))
        assert await late.serves() == (version, digest)
        report = await later_session.publish(partial(int, 1))
        assert report.lost == ()
        assert (await late.serves())[0] == 1
        await later_session.close()


@pytest.mark.parametrize("mode", ["shadow", "inplace", "cpu_async", "delta"])
async def test_a_rollout_joins_while_the_trainer_trains(mode):
    async with session_of("trainer", "rollout-0", mode=mode, **MEMBERS, **PATIENT) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        late = started.start("rollout-1")
        await late.started()
        async with session.trainer_lock:  # held while the trainer changes its weights
            assert await session.admit([late.worker()])
            report = await session.publish(partial(int, 0))
        assert report.receivers == ("rollout-0", "rollout-1")
        assert await late.serves() == served_version
        assert (await session.publish(partial(int, 1))).lost == ()
        assert await late.serves_version(1)


async def test_a_version_of_an_earlier_session_is_kept_for_joining_rollouts():
    async with session_of("trainer", "rollout-0", **MEMBERS, **PATIENT) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        again = await open_session(members, attempt=2, **PATIENT)
        await again.retain_copy(0)
        late = started.start("rollout-1")
        await late.started()
        async with again.trainer_lock:
            assert await again.admit([late.worker()])
            await again.publish(partial(int, 0))
        assert await late.serves() == served_version
        await again.close()


FAR = {"rollout-0": "far", "rollout-1": "far"}


async def joined_from_peer(session, late):
    """Returns True if a rollout received its weights from another one on its host, not from the trainer."""
    await late.started()
    async with session.trainer_lock:
        assert await session.admit([late.worker("far")])
        return await session.send_from_peers([late.name]) == [late.name]


@pytest.mark.parametrize("mode", ["shadow", "delta"])
async def test_a_rollout_gets_its_weights_from_one_on_its_host_if_the_trainer_is_elsewhere(mode):
    names, options = ("trainer", "rollout-0"), {**MEMBERS, **PATIENT, "mode": mode, "hosts": FAR}
    async with session_of(*names, **options) as (session, members, started):
        for version in range(2):
            await session.publish(partial(int, version))
        digest = await members["rollout-0"].serves_version(1)
        late = started.start("rollout-1")
        assert await joined_from_peer(session, late)
        assert await late.serves() == (1, digest)
        report = await session.publish(partial(int, 2))
        assert (report.receivers, report.lost) == (("rollout-0", "rollout-1"), ())
        assert await late.serves_version(2) == await members["rollout-0"].serves_version(2)


@pytest.mark.parametrize("hosts", [{}, {"rollout-0": "other"}], ids=["with all", "alone"])
async def test_a_rollout_without_a_nearer_peer_gets_its_weights_from_the_trainer(hosts):
    async with session_of("trainer", "rollout-0", hosts=hosts, **MEMBERS, **PATIENT) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        late = started.start("rollout-1")
        await late.started()
        assert await session.admit([late.worker("far" if hosts else "host")])
        assert await session.send_from_peers(["rollout-1"]) == []
        await session.publish(partial(int, 0))
        assert await late.serves() == served_version


async def test_engines_that_hold_no_copy_of_what_came_leave_it_to_the_trainer():
    options = {**MEMBERS, **PATIENT, "mode": "cpu_async", "hosts": FAR}
    async with session_of("trainer", "rollout-0", **options) as (session, _, started):
        await session.publish(partial(int, 0))
        assert not await joined_from_peer(session, started.start("rollout-1"))
        assert (await session.publish(partial(int, 0))).lost == ()


@SLOW_IF_STOPPED
@pytest.mark.parametrize("moment", ["before", "transfer"])
async def test_the_trainer_sends_when_a_peer_is_lost(how, moment):
    # The peer receives all buckets, and is lost when it has sent half of them.
    fall = Fall(how, bucket=NUM_BUCKETS + NUM_BUCKETS // 2) if moment == "transfer" else None
    falls = {"rollout-0": fall}
    options = {**MEMBERS, **PATIENT, "falls": falls, "hosts": FAR}
    async with session_of("trainer", "rollout-0", **options) as (session, members, started):
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        if moment == "before":
            members["rollout-0"].send_signal(how)
        late = started.start("rollout-1")
        assert not await joined_from_peer(session, late)
        report = await session.publish(partial(int, 0))
        assert (report.receivers, report.lost) == (("rollout-1",), ("rollout-0",))
        assert await late.serves() == served_version


@SLOW_IF_STOPPED
async def test_a_peer_continues_after_the_loss_of_its_receiver(how):
    options = {**MEMBERS, **PATIENT, "hosts": FAR}
    async with session_of("trainer", "rollout-0", **options) as (session, members, started):
        await session.publish(partial(int, 0))
        await members["rollout-0"].serves()
        late = started.start("rollout-1", fall=Fall(how, bucket=NUM_BUCKETS // 2))
        assert not await joined_from_peer(session, late)
        report = await session.publish(partial(int, 1))
        assert (report.receivers, report.lost) == (("rollout-0",), ("rollout-1",))
        assert await members["rollout-0"].serves_version(1)


@SLOW_IF_STOPPED
@pytest.mark.parametrize("moment", ["before", "transfer", "adopt"])
async def test_the_others_continue_after_the_loss_of_a_joining_rollout(how, moment):
    async with session_of("trainer", "rollout-0", **MEMBERS, **PATIENT) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        fall = {
            "before": None,
            "transfer": Fall(how, bucket=NUM_BUCKETS // 2),
            "adopt": Fall(how, version=0),
        }[moment]
        late = started.start("rollout-1", fall=fall)
        await late.started()
        assert await session.admit([late.worker()])
        if moment == "before":
            late.send_signal(how)
        report = await session.publish(partial(int, 0))
        assert (report.receivers, report.lost) == (("rollout-0",), ("rollout-1",))
        assert await members["rollout-0"].serves() == served_version
        assert (await session.publish(partial(int, 1))).lost == ()


@pytest.mark.parametrize("mode", ["inplace", "cpu_async", "delta"])
async def test_every_mode_serves_and_recovers(mode):
    names = ("trainer", "rollout-0", "rollout-1")
    async with session_of(*names, mode=mode, **MEMBERS, **PATIENT) as (
        session,
        members,
        _,
    ):
        for version in range(2):
            await session.publish(partial(int, version))
        members["rollout-0"].send_signal(signal.SIGKILL)
        report = await session.publish(partial(int, 2))
        assert report.lost == ("rollout-0",)
        assert await members["rollout-1"].serves_version(2)


async def test_members_that_share_a_gpu_take_weights_by_handle(caplog):
    caplog.set_level("INFO")
    names = ("trainer", "rollout-0", "rollout-1")
    async with session_of(*names, claims="cuda:a", **MEMBERS, **PATIENT) as parts:
        session, members, _ = parts
        assert [(message.mode, message.backend) for message in ways(caplog)] == [
            ("shadow", "handle")
        ]
        for version in range(2):
            assert (await session.publish(partial(int, version))).lost == ()
            served_versions = {await members[name].serves() for name in names[1:]}
            assert len(served_versions) == 1


async def test_where_nothing_can_be_opened_weights_go_through_host_memory(caplog):
    caplog.set_level("INFO")
    names = ("trainer", "rollout-0", "rollout-1")
    walled = ["rollout-1"]
    async with session_of(*names, claims="cuda:a", walled=walled, **MEMBERS, **PATIENT) as parts:
        session, members, _ = parts
        assert [(record.mode, record.backend) for record in ways(caplog)] == [
            ("shadow", "handle"),
            ("cpu_async", "auto"),
        ]
        reasons = [record.why for record in caplog.records if "slower" in record.message]
        assert ["no such process" in why for why in reasons] == [True]
        await session.publish(partial(int, 0))
        assert len({await members[name].serves() for name in names[1:]}) == 1


async def test_a_handle_that_was_asked_for_and_cannot_be_opened_is_refused():
    options = {**MEMBERS, **PATIENT, "backend": "handle", "walled": ["rollout-0"]}
    with pytest.raises(FailedPreconditionError, match=r"no such process.*backend to auto"):
        async with session_of("trainer", "rollout-0", **options):
            pass


@SIGNALS
async def test_who_is_lost_in_a_transfer_by_handle_leaves_nothing_torn(how):
    falls = {"rollout-0": Fall(how, bucket=NUM_BUCKETS + NUM_BUCKETS // 2)}
    names = ("trainer", "rollout-0", "rollout-1")
    options = {**MEMBERS, **PATIENT, "backend": "handle", "falls": falls}
    async with session_of(*names, **options) as (session, members, _):
        await session.publish(partial(int, 0))
        report = await session.publish(partial(int, 1))
        assert report.lost == ("rollout-0",)
        assert await members["rollout-1"].serves_version(1)


def ways(caplog):
    """Returns the log records of the agreed modes and backends, in order."""
    return [
        record for record in caplog.records if record.message == "trainer and rollouts share GPUs"
    ]


async def test_a_trainer_that_dies_in_a_transfer_by_handle_leaves_the_old_version():
    falls = {"trainer": Fall(signal.SIGKILL, bucket=NUM_BUCKETS + NUM_BUCKETS // 2)}
    options = {**MEMBERS, **PATIENT, "backend": "handle", "falls": falls}
    async with session_of("trainer", "rollout-0", **options) as (session, members, started):
        await session.publish(partial(int, 0))
        assert (await members["rollout-0"].serves())[0] == 0
        with pytest.raises(UnavailableError, match="trainer"):
            await session.publish(partial(int, 1))
        members["trainer"] = started.start("trainer")
        await members["trainer"].started()
        again = await open_session(members, attempt=2, backend="handle", **PATIENT)
        await again.publish(partial(int, 1))
        assert (await members["rollout-0"].serves())[0] == 1
        await again.close()


async def test_a_trainer_that_stands_still_before_its_first_version_is_waited_for():
    impatient = {**PATIENT, "answer_timeout_s": 0.5}
    async with session_of("trainer", "rollout-0", **MEMBERS, **impatient) as parts:
        session, members, _ = parts
        members["trainer"].send_signal(signal.SIGSTOP)
        publishing = asyncio.create_task(session.publish(partial(int, 0)))
        await asyncio.wait([publishing], timeout=3.0)  # several time-outs of a probe
        assert not publishing.done()
        members["trainer"].send_signal(signal.SIGCONT)
        assert (await publishing).lost == ()
        assert (await members["rollout-0"].serves())[0] == 0
        members["trainer"].send_signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"trainer at \S+ does not answer"):
            async with asyncio.timeout(10):
                await session.publish(partial(int, 1))
