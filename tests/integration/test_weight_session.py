"""Weight sessions over real processes: a lost rollout never stops the others, nobody serves torn weights."""

import asyncio
import signal
import time

import pytest

from services.common.errors import UnavailableError
from tests.helpers.weight_session import open_session, session_of

pytestmark = pytest.mark.timeout(120)

# On an idle machine it takes about 3 s; this bound only tells a deadline from a hang.
SERVES_WITHIN_S = 15.0


async def test_all_rollouts_serve_the_same_verified_version():
    async with session_of("trainer", "rollout-0", "rollout-1") as (session, members, _):
        for version in range(3):
            report = await session.publish(version)
            served = {await members[name].serves() for name in ("rollout-0", "rollout-1")}
            assert len(served) == 1
            assert served.pop()[0] == version
            assert report.lost == ()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("moment_s", [None, 0.02, 0.06], ids=["before", "early", "late"])
async def test_the_others_serve_the_new_version_soon_after_a_rollout_is_lost(signal_, moment_s):
    async with session_of("trainer", "rollout-0", "rollout-1") as (session, members, _):
        await session.publish(0)
        assert (await members["rollout-1"].serves())[0] == 0
        victim = members["rollout-0"].process
        if moment_s is None:
            victim.send_signal(signal_)
            begin = time.monotonic()
            report = await session.publish(1)
        else:
            publishing = asyncio.ensure_future(session.publish(1))
            await asyncio.sleep(moment_s)
            victim.send_signal(signal_)
            begin = time.monotonic()
            report = await publishing
        assert time.monotonic() - begin <= SERVES_WITHIN_S
        assert report.version == 1
        assert set(report.lost) <= {"rollout-0"}
        version, digest = await members["rollout-1"].serves()
        assert version == 1
        report = await session.publish(2)
        later_version, later_digest = await members["rollout-1"].serves()
        assert later_version == 2
        assert later_digest != digest


async def test_rollouts_keep_their_version_when_the_trainer_dies():
    async with session_of("trainer", "rollout-0") as (session, members, _):
        await session.publish(0)
        assert (await members["rollout-0"].serves())[0] == 0
        members["trainer"].process.kill()
        with pytest.raises(UnavailableError, match="trainer"):
            await session.publish(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(members["rollout-0"].process.stdout.readline(), 0.3)


async def test_a_rollout_that_comes_later_gets_the_version_that_is_served():
    async with session_of("trainer", "rollout-0") as (session, members, started):
        await session.publish(0)
        version, digest = await members["rollout-0"].serves()
        late = await started.start("rollout-1")
        await late.started()
        members["rollout-1"] = late
        later_session = await open_session(members, attempt=2)
        await later_session.publish(0)
        assert await late.serves() == (version, digest)
        report = await later_session.publish(1)
        assert report.lost == ()
        assert (await late.serves())[0] == 1
        await later_session.close()


@pytest.mark.parametrize("mode", ["inplace", "cpu_async", "delta"])
async def test_every_mode_serves_and_recovers(mode):
    names = ("trainer", "rollout-0", "rollout-1")
    async with session_of(*names, mode=mode) as (session, members, _):
        for version in range(2):
            await session.publish(version)
        members["rollout-0"].process.kill()
        report = await session.publish(2)
        assert report.lost == ("rollout-0",)
        assert await members["rollout-1"].serves_version(2)
