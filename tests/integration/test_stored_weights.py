"""Weights through a folder between real processes, which are killed while they write and read."""

import asyncio
import signal
from functools import partial

import pytest

from services.common.errors import UnavailableError
from tests.helpers.weight_member import Fall
from tests.helpers.weight_session import following, open_session, session_of

pytestmark = pytest.mark.timeout(240)

NUM_BYTES, BUCKET_BYTES = 1 << 20, 1 << 18
NUM_PARTS = NUM_BYTES // BUCKET_BYTES
NAMES = ("trainer", "rollout-0", "rollout-1")


def stored(folder, **spec):
    """Arguments of a session whose rollouts load weights from a folder."""
    return {
        "num_bytes": NUM_BYTES,
        "bucket_bytes": BUCKET_BYTES,
        "answer_timeout_s": 3.0,
        "backend": "storage",
        "storage": {"directory": str(folder), **spec.pop("storage", {})},
        **spec,
    }


def copies(folder):
    run = folder / "run_1"
    return sorted(path.name.partition("-")[0] for path in run.iterdir()) if run.is_dir() else []


@pytest.mark.parametrize("mode", ["shadow", "delta"])
async def test_all_rollouts_serve_each_version(tmp_path, mode):
    async with session_of(*NAMES, **stored(tmp_path, mode=mode, storage={"keep": 2})) as parts:
        session, members, _ = parts
        for version in range(4):
            report = await session.publish(partial(int, version))
            assert (report.receivers, report.late, report.lost) == (NAMES[1:], (), ())
            served_versions = {await members[name].serves() for name in NAMES[1:]}
            assert len(served_versions) == 1
            assert served_versions.pop()[0] == version
            assert len(copies(tmp_path)) <= 2
    assert copies(tmp_path) == []


@pytest.mark.parametrize(
    "part_index", [1, NUM_PARTS, pytest.param(2, marks=pytest.mark.nightly), NUM_PARTS + 2]
)
async def test_rollouts_keep_their_version_when_the_trainer_is_killed_while_it_writes(
    tmp_path, part_index
):
    """The next trainer removes the rest, and its version is served."""
    fall = Fall(signal.SIGKILL, bucket=NUM_PARTS + part_index)
    spec = stored(tmp_path)
    async with session_of("trainer", "rollout-0", falls={"trainer": fall}, **spec) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        assert (await members["rollout-0"].serves())[0] == 0
        if part_index <= NUM_PARTS:
            with pytest.raises(UnavailableError, match="trainer"):
                await session.publish(partial(int, 1))
            with pytest.raises(TimeoutError):
                await members["rollout-0"].serves(timeout_s=0.3)
        else:
            await session.publish(partial(int, 1))
            await members["rollout-0"].serves_version(1)
            with pytest.raises(UnavailableError, match="trainer"):
                await session.publish(partial(int, 2))
        assert copies(tmp_path)
        members["trainer"] = started.start("trainer")
        await members["trainer"].started()
        del spec["num_bytes"]
        later_session = await open_session(members, attempt=2, **spec)
        async with following(later_session):
            await later_session.publish(partial(int, 7))
            await members["rollout-0"].serves_version(7)
            assert copies(tmp_path) == ["v00000007"]
        await later_session.close()


@pytest.mark.parametrize("moment", ["read", "adopt"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_others_serve_the_new_version_when_a_rollout_is_lost(tmp_path, how, moment):
    fall = {
        "read": Fall(how, bucket=NUM_PARTS + NUM_PARTS // 2),
        "adopt": Fall(how, version=1),
    }[moment]
    async with session_of(*NAMES, falls={"rollout-0": fall}, **stored(tmp_path)) as parts:
        session, members, _ = parts
        await session.publish(partial(int, 0))
        report = await session.publish(partial(int, 1))
        assert report.receivers == ("rollout-1",)
        assert await members["rollout-1"].serves_version(1)
        for version in range(2, 20):  # a stopped process counts as lost after some seconds
            report = await session.publish(partial(int, version))
            assert report.receivers == ("rollout-1",)
            assert await members["rollout-1"].serves_version(version)
            if not report.late:
                break
        assert report.lost == ("rollout-0",)


async def test_a_slow_rollout_delays_no_other_and_catches_up(tmp_path):
    async with session_of(*NAMES, **stored(tmp_path, answer_timeout_s=60.0)) as parts:
        session, members, _ = parts
        await session.publish(partial(int, 0))
        members["rollout-0"].send_signal(signal.SIGSTOP)
        for version in (1, 2):
            report = await session.publish(partial(int, version))
            assert (report.receivers, report.late) == (("rollout-1",), ("rollout-0",))
            await members["rollout-1"].serves_version(version)
        members["rollout-0"].send_signal(signal.SIGCONT)
        await members["rollout-0"].serves_version(2)
        async with asyncio.timeout(30):
            # The member's answer reaches the test first.
            while session.served_by(2) != NAMES[1:]:  # noqa: ASYNC110 -- the event stays set
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["shadow", "delta"])
async def test_a_rollout_that_joins_loads_the_served_version(tmp_path, mode):
    async with session_of("trainer", "rollout-0", **stored(tmp_path, mode=mode)) as parts:
        session, members, started = parts
        for version in range(3):
            await session.publish(partial(int, version))
            served_version = await members["rollout-0"].serves()
        late = started.start("rollout-1")
        await late.started()
        async with session.trainer_lock:  # held while the trainer changes its weights
            assert await session.admit([late.worker()])
            report = await session.publish(partial(int, 2))
        assert report.receivers == ("rollout-0", "rollout-1")
        assert await late.serves() == served_version
        await session.publish(partial(int, 3))
        await late.serves_version(3)


async def test_a_version_that_is_damaged_in_the_store_is_written_again(tmp_path):
    async with session_of("trainer", "rollout-0", **stored(tmp_path)) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        served_version = await members["rollout-0"].serves()
        (file,) = (tmp_path / "run_1").glob("v*/source-0/part-00001")
        file.write_bytes(bytes(len(file.read_bytes())))
        late = started.start("rollout-1")
        await late.started()
        assert await session.admit([late.worker()])
        report = await session.publish(partial(int, 0))
        assert report.receivers == ("rollout-0", "rollout-1")
        assert await late.serves() == served_version


async def test_a_store_that_is_gone_is_reported_and_used_again_later(tmp_path):
    async with session_of("trainer", "rollout-0", **stored(tmp_path)) as parts:
        session, members, _ = parts
        await session.publish(partial(int, 0))
        await members["rollout-0"].serves()
        (tmp_path / "run_1").rename(tmp_path / "old")
        (tmp_path / "run_1").write_text("")  # no folder can be made here
        publishing = asyncio.create_task(session.publish(partial(int, 1)))
        async with asyncio.timeout(30):
            while not session.store_troubles:  # noqa: ASYNC110 -- a message of another process
                await asyncio.sleep(0.05)
        assert "Not a directory" in session.store_troubles["trainer"].cause
        assert not session.trainer_lock.locked()  # the next step need not wait
        (tmp_path / "run_1").unlink()
        await publishing
        await members["rollout-0"].serves_version(1)
        assert session.store_troubles == {}


async def test_a_store_that_stays_away_ends_the_wait_with_its_first_cause(tmp_path):
    spec = stored(tmp_path, storage={"timeout_s": 2.0})
    async with session_of("trainer", "rollout-0", **spec) as parts:
        session, members, _ = parts
        await session.publish(partial(int, 0))
        await members["rollout-0"].serves()
        (tmp_path / "run_1").rename(tmp_path / "old")
        (tmp_path / "run_1").write_text("")
        with pytest.raises(Exception, match=r"for 2 s; first cause: trainer: .*Not a directory"):
            await session.publish(partial(int, 1))
