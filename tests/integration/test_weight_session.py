"""Weight sessions over real processes: a lost rollout never stops the others, nobody serves torn weights."""

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager

import pytest

from services.common.errors import UnavailableError
from services.common.grpc_server import serve
from services.common.spec.weight_sync import WeightSyncSpec
from services.controller.membership import Worker
from services.controller.rendezvous import RendezvousStore
from services.controller.rendezvous_server import RendezvousServicer
from services.controller.run.weight_sync import WeightSession
from slipstream.controller.v1 import membership_pb2_grpc
from tests.helpers.cli import REPOSITORY, environment

pytestmark = pytest.mark.timeout(120)

NUM_BYTES = 64 << 20
# On an idle machine it takes about 3 s; this bound only tells a deadline from a hang.
SERVES_WITHIN_S = 15.0


class Member:
    """A member process and what it printed."""

    def __init__(self, name, process, port):
        self.name = name
        self.process = process
        self.port = port

    def worker(self):
        return Worker(
            run_id="run_1",
            worker_id=self.name,
            incarnation="1",
            role="trainer" if self.name == "trainer" else "rollout",
            address=f"127.0.0.1:{self.port}",
            host_id="host",
            last_heard=0.0,
        )

    async def serves(self):
        """Version and digest of the newest adoption."""
        line = (await asyncio.wait_for(self.process.stdout.readline(), 10)).decode().split()
        assert line[0] == "serves"
        return int(line[1]), line[2]


@asynccontextmanager
async def session_of(*names):
    """A session between processes; yields it with its members by name."""
    store = RendezvousStore()

    def register(server):
        membership_pb2_grpc.add_RendezvousServiceServicer_to_server(
            RendezvousServicer(store), server
        )

    members = {}
    async with serve("127.0.0.1:0", register) as port:
        try:
            for name in names:
                role = "trainer" if name == "trainer" else "rollout"
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.helpers.weight_member"),
                    *(role, f"127.0.0.1:{port}", str(NUM_BYTES)),
                    stdout=asyncio.subprocess.PIPE,
                    cwd=REPOSITORY,
                    env=environment(),
                )
                members[name] = Member(name, process, None)
            for member in members.values():
                line = await asyncio.wait_for(member.process.stdout.readline(), 60)
                member.port = int(line.split()[1])
            session = WeightSession(WeightSyncSpec(), "run_1")
            rollouts = [m.worker() for name, m in members.items() if name != "trainer"]
            await session.open(members["trainer"].worker(), rollouts)
            yield session, members
            await session.close()
        finally:
            for member in members.values():
                if member.process.returncode is None:
                    member.process.kill()
                    await member.process.wait()


async def test_all_rollouts_serve_the_same_verified_version():
    async with session_of("trainer", "rollout-0", "rollout-1") as (session, members):
        for version in range(3):
            report = await session.publish(version)
            served = {await members[name].serves() for name in ("rollout-0", "rollout-1")}
            assert len(served) == 1
            assert served.pop()[0] == version
            assert report.lost == ()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("moment_s", [None, 0.02, 0.06], ids=["before", "early", "late"])
async def test_the_others_serve_the_new_version_soon_after_a_rollout_is_lost(signal_, moment_s):
    async with session_of("trainer", "rollout-0", "rollout-1") as (session, members):
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
    async with session_of("trainer", "rollout-0") as (session, members):
        await session.publish(0)
        assert (await members["rollout-0"].serves())[0] == 0
        members["trainer"].process.kill()
        with pytest.raises(UnavailableError, match="trainer"):
            await session.publish(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(members["rollout-0"].process.stdout.readline(), 0.3)
