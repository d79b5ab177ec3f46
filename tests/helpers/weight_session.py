"""A weight session between processes on this machine."""

import asyncio
import os
from contextlib import asynccontextmanager

from services.common.rpc.server import serve
from services.common.runspec.run import WeightSyncSpec
from services.common.task_group import TaskGroup
from services.controller.api.membership import RendezvousServicer
from services.controller.membership import RendezvousStore, Worker
from services.controller.run.weights.session import WeightSession
from slipstream.controller.v1 import membership_pb2_grpc
from tests.helpers.forks import PROCESSES
from tests.helpers.weight_member import Options, run


class Member:
    """A member process and its reports."""

    def __init__(self, name, options):
        self.name = name
        self.port = 0
        self._reports, sending_end = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=run, args=(options, sending_end), daemon=True)
        self.process.start()
        sending_end.close()

    def worker(self, host_id="host"):
        return Worker(
            run_id="run_1",
            worker_id=self.name,
            incarnation=str(self.process.pid),
            role="trainer" if self.name == "trainer" else "rollout",
            address=f"127.0.0.1:{self.port}",
            host_id=host_id,
            last_heartbeat=0.0,
        )

    async def started(self):
        """Waits until the member can be called."""
        _, port = await self._read_report(90)
        self.port = int(port)

    async def serves(self, timeout_s=60):
        """Waits for the member's next report of an adoption; returns its version and digest."""
        line = await self._read_report(timeout_s)
        assert line[0] == "serves", line
        return int(line[1]), line[2]

    async def serves_version(self, version):
        """Waits until the member reports the adoption of a version; returns the digest."""
        while True:
            version_served, digest = await self.serves()
            if version_served == version:
                return digest

    def send_signal(self, signal_):
        os.kill(self.process.pid, signal_)

    def end(self):
        """Kills the process."""
        self.process.kill()
        self.process.join()

    async def _read_report(self, timeout_s):
        if not await asyncio.to_thread(self._reports.poll, timeout_s):
            raise TimeoutError(f"{self.name} reported nothing within {timeout_s} s")
        return self._reports.recv_bytes().decode().split()


class Members:
    """Starts member processes of one session."""

    def __init__(self, port, num_bytes, *, use_gpu=False, patience_s=None):
        self._port = port
        self._num_bytes = num_bytes
        self._use_gpu = use_gpu
        self._patience_s = patience_s
        self.all = []

    def start(self, name, device=0, fall=None, claims="", *, is_walled=False):
        """Starts a process without waiting for it."""
        options = Options(
            role="trainer" if name == "trainer" else "rollout",
            rendezvous=f"127.0.0.1:{self._port}",
            num_bytes=self._num_bytes,
            device=f"cuda:{device}" if self._use_gpu else "cpu",
            fall=fall,
            claims=claims,
            is_walled=is_walled,
            patience_s=self._patience_s,
        )
        self.all.append(Member(name, options))
        return self.all[-1]


@asynccontextmanager
async def members_of(num_bytes, **options):
    """Yields an object that starts member processes; all end with the block."""
    store = RendezvousStore()
    store.open("run_1")
    add = membership_pb2_grpc.add_RendezvousServiceServicer_to_server
    async with serve("127.0.0.1:0", lambda server: add(RendezvousServicer(store), server)) as port:
        members = Members(port, num_bytes, **options)
        try:
            yield members
        finally:
            for member in members.all:
                member.end()


@asynccontextmanager
async def session_of(
    *names,
    num_bytes,
    use_gpu=False,
    patience_s=None,
    falls=None,
    claims="",
    walled=(),
    devices=None,
    hosts=None,
    **spec,
):
    """Yields a formed session, its members by name, and an object that starts further members."""
    falls, devices = falls or {}, devices or range(len(names))
    async with members_of(num_bytes, use_gpu=use_gpu, patience_s=patience_s) as started:
        members = {
            name: started.start(name, device, falls.get(name), claims, is_walled=name in walled)
            for device, name in zip(devices, names, strict=True)
        }
        for member in members.values():
            await member.started()
        session = await open_session(members, hosts=hosts, **spec)
        async with following(session):
            yield session, members, started
        await session.close()


@asynccontextmanager
async def following(session):
    """Lets rollouts load stored versions, as the pipeline does; does nothing for members that meet."""
    late = asyncio.Event()

    async def on_late():
        late.set()

    session.late = late
    async with TaskGroup() as tasks:
        loop = tasks.create_task(session.follow(on_late))
        yield
        loop.cancel()


async def open_session(members, *, attempt=1, hosts=None, **spec):
    """Returns a formed session of members by name, opened as the pipeline does at each start.

    All members are on one host, except those that ``hosts`` names.
    """
    hosts = hosts or {}
    session = WeightSession(WeightSyncSpec(**spec), "run_1", first_epoch=attempt << 20)
    rollouts = [
        member.worker(hosts.get(name, "host"))
        for name, member in members.items()
        if name != "trainer"
    ]
    await session.open(members["trainer"].worker(), rollouts)
    return session
