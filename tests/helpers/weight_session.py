"""A weight session between processes on this machine."""

import asyncio
import sys
from contextlib import asynccontextmanager

from services.common.grpc_server import serve
from services.common.spec.weight_sync import WeightSyncSpec
from services.controller.membership import Worker
from services.controller.rendezvous import RendezvousStore
from services.controller.rendezvous_server import RendezvousServicer
from services.controller.run.weight_sync import WeightSession
from slipstream.controller.v1 import membership_pb2_grpc
from tests.helpers.cli import REPOSITORY, environment


class Member:
    """A member process and what it printed."""

    def __init__(self, name, process):
        self.name = name
        self.process = process
        self.port = 0

    def worker(self):
        return Worker(
            run_id="run_1",
            worker_id=self.name,
            incarnation=str(self.process.pid),
            role="trainer" if self.name == "trainer" else "rollout",
            address=f"127.0.0.1:{self.port}",
            host_id="host",
            last_heard=0.0,
        )

    async def started(self, timeout_s=90):
        """Return once it can be called."""
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        self.port = int(line.split()[1])

    async def serves(self):
        """Version and digest of the next adoption that it tells of."""
        line = (await asyncio.wait_for(self.process.stdout.readline(), 10)).decode().split()
        assert line[0] == "serves", line
        return int(line[1]), line[2]

    async def serves_version(self, version):
        """Digest of a version that it tells of, now or later."""
        while True:
            found, digest = await self.serves()
            if found == version:
                return digest

    async def end(self):
        """Kill the process."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Members:
    """Starts member processes of one session."""

    def __init__(self, port, num_bytes, *, use_gpu=False):
        self._port = port
        self._num_bytes = num_bytes
        self._use_gpu = use_gpu
        self.all = []

    async def start(self, name, device=0):
        """Start a process; it is not up yet."""
        role = "trainer" if name == "trainer" else "rollout"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.helpers.weight_member"),
            *(role, f"127.0.0.1:{self._port}", str(self._num_bytes)),
            f"cuda:{device}" if self._use_gpu else "cpu",
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment(),
        )
        member = Member(name, process)
        self.all.append(member)
        return member


@asynccontextmanager
async def members_of(num_bytes, *, use_gpu=False):
    """Room for member processes; all end with the block."""
    store = RendezvousStore()
    add = membership_pb2_grpc.add_RendezvousServiceServicer_to_server
    async with serve("127.0.0.1:0", lambda server: add(RendezvousServicer(store), server)) as port:
        members = Members(port, num_bytes, use_gpu=use_gpu)
        try:
            yield members
        finally:
            for member in members.all:
                await member.end()


@asynccontextmanager
async def session_of(*names, num_bytes=64 << 20, use_gpu=False, **spec):
    """A formed session; yields it with its members by name, and what starts others."""
    async with members_of(num_bytes, use_gpu=use_gpu) as started:
        members = {name: await started.start(name, device) for device, name in enumerate(names)}
        for member in members.values():
            await member.started()
        session = await open_session(members, **spec)
        yield session, members, started
        await session.close()


async def open_session(members, *, attempt=1, **spec):
    """A formed session of members by name, as the run's loop opens one each time that it is entered."""
    session = WeightSession(WeightSyncSpec(**spec), "run_1", first_epoch=attempt << 20)
    rollouts = [member.worker() for name, member in members.items() if name != "trainer"]
    await session.open(members["trainer"].worker(), rollouts)
    return session
