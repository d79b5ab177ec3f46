"""Speed and size of the index with many samples."""

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator
from statistics import median

import torch

from services.transferqueue.index.index import Index
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest

_PUT_KEYS = 1000
_PARTITION = "bench/metadata"


def put_meta(first: int, count: int) -> KVBatchMeta:
    """Returns a put of ``count`` samples with two fields and four tags."""
    lengths = tuple(range(512, 512 + count))
    offsets = tuple(4 * 4096 * n for n in range(count))
    blobs = tuple(
        BlobRef(shard_id="s", blob_id=2 * first + n, size_bytes=1 << 40, checksum=0)
        for n in range(2)
    )
    fields = tuple(
        FieldColumn(
            name=name,
            dtype="float32",
            row_rank=1,
            tail_shape=(),
            lengths=lengths,
            blob_indexes=(number,) * count,
            offsets=offsets,
        )
        for number, name in enumerate(("ids", "logprobs"))
    )
    numbers = range(first, first + count)
    return KVBatchMeta(
        partition_id=_PARTITION,
        keys=tuple(f"group-{n // 8}.{n % 8}" for n in numbers),
        fields=fields,
        blobs=blobs,
        tags={
            "group_id": tuple(f"group-{n // 8}" for n in numbers),
            "v_min": tuple(n // 1000 for n in numbers),
            "reward": tuple(float(n % 2) for n in numbers),
            "response_tokens": lengths,
        },
    )


async def index_figures(num_keys: int) -> dict[str, float]:
    """Measures the index alone, in this process."""
    index = await _filled(num_keys)
    request = AcquireRequest(
        partition_id=_PARTITION, consumer="train", fields=("ids",), num_keys=256, group_size=8
    )
    await index.leasing.acquire(request)
    acquire_s = []
    for _ in range(20):
        started = time.perf_counter()
        await index.leasing.acquire(request)
        acquire_s.append(time.perf_counter() - started)
    wake_s = []
    async with asyncio.TaskGroup() as tasks:
        watch = index.watch(_PARTITION, num_keys)
        for n in range(20):
            waiting = tasks.create_task(_next(watch))
            await asyncio.sleep(0)
            started = time.perf_counter()
            await index.commit(put_meta(num_keys + 8 * n, 8), put_id=f"late-{n}")
            await waiting
            wake_s.append(time.perf_counter() - started)
    return {
        "acquire_256_ms": 1e3 * median(acquire_s),
        "watch_wake_ms": 1e3 * median(wake_s),
    }


async def _next(watch: AsyncIterator[KVBatchMeta]) -> KVBatchMeta:
    return await anext(watch)


async def _filled(num_keys: int, put_keys: int = _PUT_KEYS) -> Index:
    index = Index(lambda blobs: None, time)
    index.create_partition(_PARTITION, required_fields=["ids", "logprobs"], quota_bytes=0)
    for first in range(0, num_keys, put_keys):
        await index.commit(put_meta(first, put_keys), put_id=str(first))
    return index


async def bytes_per_key(num_keys: int) -> dict[str, float]:
    """Measures the index's memory per sample, by the number of samples of a put."""
    sizes = (_PUT_KEYS, 8, 1)
    return {str(put_keys): await _bytes_per_key(num_keys, put_keys) for put_keys in sizes}


async def _bytes_per_key(num_keys: int, put_keys: int) -> float:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = await _filled(num_keys, put_keys)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.stats()[0].num_keys == num_keys
    return (after - before) / num_keys


async def service_figures(address: str, num_keys: int) -> dict[str, float]:
    """Measures the public clients: ingest, acquire, wake-up of a watcher."""
    values = {"ids": torch.zeros(_PUT_KEYS, 8), "logprobs": torch.zeros(_PUT_KEYS, 8)}
    async with (
        TransferQueueClient.connect(address) as metadata,
        DataClient.connect(address) as data,
    ):
        await metadata.create_partition(_PARTITION, required_fields=list(values))
        started = time.perf_counter()
        for first in range(0, num_keys, _PUT_KEYS):
            meta = put_meta(first, _PUT_KEYS)
            await data.put(_PARTITION, meta.keys, values, tags=meta.tags)
        ingest = num_keys / (time.perf_counter() - started)
        request = AcquireRequest(
            partition_id=_PARTITION, consumer="train", fields=("ids",), num_keys=256, group_size=8
        )
        await metadata.acquire(request)
        acquire_s = []
        for _ in range(20):
            started = time.perf_counter()
            await metadata.acquire(request)
            acquire_s.append(time.perf_counter() - started)
        wake_s = []
        watch = metadata.watch(_PARTITION, num_keys)
        async with asyncio.TaskGroup() as tasks:
            for n in range(20):
                waiting = tasks.create_task(_next(watch))
                await asyncio.sleep(0.01)
                meta = put_meta(num_keys + 8 * n, 8)
                rows = {name: column[:8] for name, column in values.items()}
                await data.put(_PARTITION, meta.keys, rows, tags=meta.tags)
                started = time.perf_counter()
                await waiting
                wake_s.append(time.perf_counter() - started)
    return {
        "ingest_keys_per_s": ingest,
        "acquire_256_ms": 1e3 * median(acquire_s),
        "watch_wake_after_put_ms": 1e3 * median(wake_s),
    }
