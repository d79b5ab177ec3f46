"""The two sides as processes: our service, and the peer in its own environment."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.dataplane.workloads import Workload
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient

ROOT = Path(__file__).parents[2]
PEER_VENV = ROOT / "build" / "peer"
PEER_PACKAGES = ("TransferQueue==0.1.11", "torch==2.13.0", "redis")


@contextmanager
def service(**settings: object) -> Iterator[str]:
    """Runs our service in a separate process; yields its address."""
    with TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        environment = dict(os.environ)  # noqa: TID251  a child process inherits it
        for name, value in {"ready_file": ready, "capacity_bytes": 1 << 30, **settings}.items():
            environment[f"SLIPSTREAM_TRANSFERQUEUE_{name.upper()}"] = str(value)
        environment["SLIPSTREAM_TRANSFERQUEUE_LOG_LEVEL"] = "WARNING"
        command = [sys.executable, "-m", "services.transferqueue"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            while not (ready.exists() and ready.read_text()):
                assert process.poll() is None, "the service ended"
                time.sleep(0.02)
            yield json.loads(ready.read_text())["address"]
        finally:
            process.terminate()
            process.wait(timeout=20)


class Ours:
    """Our client on one path."""

    def __init__(self, metadata: TransferQueueClient, data: DataClient) -> None:
        self._metadata = metadata
        self._data = data

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, *, use_shared_memory: bool) -> AsyncIterator["Ours"]:
        """Connects to a running service."""
        async with (
            TransferQueueClient.connect(address) as metadata,
            DataClient.connect(address, use_shared_memory=use_shared_memory) as data,
        ):
            yield cls(metadata, data)

    async def measure(
        self, workload: Workload, *, check: bool = False, owner: str = "k"
    ) -> tuple[float, float]:
        """Returns the seconds of a put and of a get; ``owner`` separates the keys of several clients."""
        partition = f"bench/{workload.name}"
        names = list(workload.fields)
        await self._metadata.create_partition(partition, required_fields=names)
        put_s = get_s = 0.0
        for _ in range(workload.repeats):
            keys = [f"{owner}.{n}" for n in range(workload.num_rows)]
            started = time.perf_counter()
            meta = await self._data.put(
                partition, keys, workload.fields, tags={"group_id": ["g"] * len(keys)}
            )
            put_s += time.perf_counter() - started
            started = time.perf_counter()
            fetched = await self._data.get(meta, names)
            get_s += time.perf_counter() - started
            if check:
                for name, values in workload.fields.items():
                    rows = fetched[name].unbind()
                    assert all(torch.equal(a, b) for a, b in zip(rows, values, strict=True)), name
            del fetched
            await self._metadata.release(partition, keys)
        return put_s / workload.repeats, get_s / workload.repeats


class Peer:
    """The peer's process."""

    def __init__(self, process: "subprocess.Popen[str]", answers: int) -> None:
        self._process = process
        self._answers = os.fdopen(answers)

    @classmethod
    @contextmanager
    def start(cls, num_units: int) -> Iterator["Peer"]:
        """Starts the peer with some storage units; installs it on first use."""
        if not (PEER_VENV / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
            pip = [str(PEER_VENV / "bin" / "pip"), "install", "-q", *PEER_PACKAGES]
            subprocess.run(pip, check=True)
        reader, writer = os.pipe()
        command = [
            str(PEER_VENV / "bin" / "python"), "-m", "bench.dataplane.peer",
            str(num_units), str(writer),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[writer],
        )
        os.close(writer)
        try:
            yield cls(process, reader)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)

    def ask(self, **request: object) -> tuple[float, float]:
        """Returns the seconds of a put and of a get."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, "the peer ended"
        put_s, get_s = json.loads(line)
        return put_s, get_s
