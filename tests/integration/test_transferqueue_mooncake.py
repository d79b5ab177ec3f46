"""The same service with its bytes in Mooncake Store."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from services.common.errors import InternalError, NotFoundError, ResourceExhaustedError
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.data.client import DataClient
from services.wire.data.placement import place
from services.wire.transferqueue.client import TransferQueueClient
from tests.helpers.ports import free_port

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store needs slipstream[mooncake] and libibverbs1, libnuma1, libcurl4",
    exc_type=ImportError,
)

TRAIN = "run_1/train"
MIB = 1 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "mooncake_master"),
        f"--rpc_port={port}",
        f"--metrics_port={free_port()}",
        "--eviction_high_watermark_ratio=1.0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
async def clients(
    master: str, tmp_path: Path
) -> AsyncIterator[tuple[TransferQueueClient, DataClient]]:
    settings = TransferQueueSettings(
        backend="mooncake",
        mooncake_master=master,
        capacity_bytes=64 * MIB,
        snapshot_folder=tmp_path,
    )
    async with (
        transferqueue(settings) as address,
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address, put_timeout_s=0.1) as data,
    ):
        await metadata.create_partition(TRAIN, required_fields=["tokens"])
        yield metadata, data


async def test_what_was_put_comes_back_until_it_is_released(
    clients: tuple[TransferQueueClient, DataClient],
) -> None:
    metadata, data = clients
    tokens = [torch.arange(n, dtype=torch.int32) for n in (3, 0, 200_000)]
    meta = await data.put(
        TRAIN,
        ["g.0", "g.1", "g.2"],
        {"tokens": tokens, "rewards": torch.tensor([0.5, 1.0, -1.0])},
        shared={"prompt_ids": torch.tensor([7, 8, 9], dtype=torch.int32)},
    )
    fetched = await data.get(meta.select(["g.2", "g.0"]), ["tokens", "rewards", "prompt_ids"])
    assert all(map(torch.equal, fetched["tokens"].unbind(), [tokens[2], tokens[0]]))
    assert fetched["rewards"].values.tolist() == [-1.0, 0.5]
    assert [row.tolist() for row in fetched["prompt_ids"].unbind()] == [[7, 8, 9]] * 2
    assert await metadata.release(TRAIN, meta.keys) == 3
    assert (await metadata.stats()).shards[0].stored_bytes == 0
    async with asyncio.timeout(10):
        with pytest.raises(NotFoundError):
            while True:
                await data.get(meta, ["tokens"])


async def test_a_batch_larger_than_the_buffer_comes_back(
    clients: tuple[TransferQueueClient, DataClient],
) -> None:
    _, data = clients
    values = torch.arange(5 * MIB, dtype=torch.int64).reshape(2, -1)
    meta = await data.put(TRAIN, ["a", "b"], {"tokens": values})
    fetched = await data.get(meta, ["tokens"])
    assert torch.equal(fetched["tokens"].values, values.reshape(-1))


async def test_a_full_store_pushes_back(
    clients: tuple[TransferQueueClient, DataClient],
) -> None:
    metadata, data = clients
    big = [torch.zeros(40 * MIB, dtype=torch.uint8)]
    await data.put(TRAIN, ["a"], {"tokens": big})
    with pytest.raises(ResourceExhaustedError):
        await data.put(TRAIN, ["b"], {"tokens": big})
    await metadata.release(TRAIN, ["a"])


async def test_a_run_comes_back_from_its_snapshot(
    clients: tuple[TransferQueueClient, DataClient],
) -> None:
    metadata, data = clients
    tokens = [torch.arange(n, dtype=torch.int32) for n in (3, 1000)]
    await data.put(TRAIN, ["g.0", "g.1"], {"tokens": tokens})
    assert await metadata.save_snapshot("run_1", "s") == 2
    await metadata.drop_partition(TRAIN)
    assert await metadata.restore_snapshot("run_1", "s") == 2
    meta = await metadata.get_batch(TRAIN, ["g.0", "g.1"])
    fetched = await data.get(meta, ["tokens"])
    assert all(map(torch.equal, fetched["tokens"].unbind(), tokens))


async def test_samples_outlive_a_process_that_lent_memory_for_a_copy(
    master: str, tmp_path: Path
) -> None:
    settings = TransferQueueSettings(
        backend="mooncake",
        mooncake_master=master,
        mooncake_replicas=2,
        capacity_bytes=64 * MIB,
        snapshot_folder=tmp_path,
    )
    async with (
        transferqueue(settings) as address,
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address) as data,
    ):
        await metadata.create_partition(TRAIN, required_fields=["tokens"])
        lender = start_lender(master, address, tmp_path)
        try:
            async for shards in metadata.connect_client():
                if len(shards) == 2:
                    break
            while len(data.shards) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            group = next(f"g{n}" for n in range(64) if place(f"g{n}", data.shards) == "shard-0")
            tokens = [torch.arange(n, dtype=torch.int32) for n in (3, 200_000)]
            meta = await data.put(TRAIN, [f"{group}.0", f"{group}.1"], {"tokens": tokens})
        finally:
            lender.kill()
            lender.wait(timeout=20)
        fetched = await data.get(meta, ["tokens"])
        assert all(map(torch.equal, fetched["tokens"].unbind(), tokens))
        await metadata.release(TRAIN, meta.keys)


async def test_a_server_that_is_not_the_master_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("services.wire.data.channels.object_store._CONNECT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = TransferQueueSettings(
            backend="mooncake",
            mooncake_master=address,
            capacity_bytes=64 * MIB,
            snapshot_folder=tmp_path,
        )
        with pytest.raises(InternalError, match=f"Mooncake Store at {address} cannot be used"):
            async with transferqueue(settings):
                pass


def start_lender(master: str, address: str, folder: Path) -> "subprocess.Popen[bytes]":
    """One more shard, in a process that can be killed."""
    prefix = "SLIPSTREAM_TRANSFERQUEUE_"
    changes = {
        "BACKEND": "mooncake",
        "MOONCAKE_MASTER": master,
        "INDEX_ADDRESS": address,
        "SHARD_ID": "shard-1",
        "CAPACITY_BYTES": str(64 * MIB),
        "SNAPSHOT_FOLDER": str(folder),
    }
    environment = os.environ | {prefix + name: value for name, value in changes.items()}
    return subprocess.Popen([sys.executable, "-m", "services.transferqueue"], env=environment)
