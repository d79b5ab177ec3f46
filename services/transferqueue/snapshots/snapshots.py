"""Saves and restores the samples of a run, index and bytes, as part of its checkpoint.

A snapshot is a file of records, each with its length and checksum: for every partition one record
that describes it, then one record per put followed by the bytes of its blobs, and an end mark. The
bytes pass through the data sockets, so the shards may run anywhere. Leases are not saved: leased
samples are delivered again.
"""

import asyncio
import os
import re
import struct
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import msgpack
import zmq

from services.common.errors import (
    AlreadyExistsError,
    DataLossError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from services.common.fields import group_of, new_id
from services.transferqueue.index.index import Index
from services.transferqueue.shards import Shards
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding import codec
from services.wire.data.encoding.codec import blob_checksum
from services.wire.data.placement import place
from services.wire.data.transport.connection import ShardConnection
from services.wire.transferqueue.types import PartitionImage

_TIMEOUT_S = 60.0
_READ_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10


class BlobClient:
    """Reads and writes blobs through the data sockets of shards; see ``connect``."""

    def __init__(self, connections: dict[str, ShardConnection]) -> None:
        self._connections = connections

    @classmethod
    @asynccontextmanager
    async def connect(cls, shards: Shards) -> AsyncIterator["BlobClient"]:
        context = zmq.Context()
        key_pair = zmq.curve_keypair()
        connections: dict[str, ShardConnection] = {}
        try:
            async with aclosing(shards.connect(key_pair[0].decode())) as admitted:
                for shard in await anext(admitted):
                    connections[shard.shard_id] = ShardConnection.over_network(
                        context, shard, key_pair
                    )
                yield cls(connections)
        finally:
            for connection in connections.values():
                connection.close()
            context.destroy(linger=0)

    async def read(self, blob: BlobRef, ranges: Sequence[tuple[int, int]]) -> bytes:
        """Returns the concatenated bytes of ``(offset, size)`` ranges of a blob.

        Raises:
            DataLossError: If they arrive damaged.
        """
        pieces = [
            (blob.blob_id, begin, min(_READ_BYTES, offset + size - begin))
            for offset, size in ranges
            for begin in range(offset, offset + size, _READ_BYTES)
        ]
        return b"".join([await self._read(blob.shard_id, [piece]) for piece in pieces])

    async def read_all(self, blobs: Sequence[BlobRef]) -> list[bytes]:
        """Returns the bytes of each blob; small blobs of a shard share requests.

        Raises:
            DataLossError: If they arrive damaged.
        """
        contents: dict[BlobRef, bytes] = {}
        small: dict[str, list[BlobRef]] = {}
        for blob in blobs:
            if blob.size_bytes <= _SMALL_BYTES:
                small.setdefault(blob.shard_id, []).append(blob)
            else:
                contents[blob] = await self.read(blob, [(0, blob.size_bytes)])
        for shard_id, of_shard in small.items():
            for first in range(0, len(of_shard), _READ_BYTES // _SMALL_BYTES):
                batch = of_shard[first : first + _READ_BYTES // _SMALL_BYTES]
                data = await self._read(shard_id, [(b.blob_id, 0, b.size_bytes) for b in batch])
                for blob, end in zip(batch, accumulate(b.size_bytes for b in batch), strict=True):
                    contents[blob] = data[end - blob.size_bytes : end]
        return [contents[blob] for blob in blobs]

    async def _read(self, shard_id: str, ranges: Sequence[tuple[int, int, int]]) -> bytes:
        """Requests ``(blob id, offset, size)`` ranges of at most ``_READ_BYTES`` together."""
        connection = self._connection(shard_id)
        request = codec.Read(tuple(chain.from_iterable(ranges)), in_arena=False)
        frames: list[memoryview] = []
        answer, last = await connection.request(request, timeout_s=_TIMEOUT_S, take=frames.extend)
        data = b"".join([*frames, *last])
        connection.release_pin(answer)
        if not isinstance(answer, codec.Data) or codec.checksum(data) != answer.checksum:
            raise DataLossError(
                f"blob {ranges[0][0]} on {shard_id}, or one read with it, is corrupted"
            )
        return data

    async def put(self, shard_id: str, meta: KVBatchMeta, payload: Sequence[bytes]) -> None:
        """Stores samples; ``payload`` holds the bytes of each blob of ``meta``."""
        connection = self._connection(shard_id)
        put_id = new_id("put")
        sizes = tuple(map(len, payload))
        reserve = codec.Reserve(put_id, meta.partition_id, sizes, 0.0)
        grant, _ = await connection.request(reserve, timeout_s=_TIMEOUT_S)
        if not isinstance(grant, codec.Granted):
            raise InternalError(f"expected Granted, the shard sent {type(grant).__name__}")
        connection.send_request(codec.Describe(put_id, meta.to_bytes()))
        for blob_id, data in zip(grant.blob_ids, payload, strict=True):
            view = memoryview(data)
            for begin in range(0, len(data), codec.FRAME_BYTES):
                frame = view[begin : begin + codec.FRAME_BYTES]
                connection.send_request(codec.Write(blob_id, begin), [frame])
        commit = codec.Commit(put_id, tuple(blob.checksum for blob in meta.blobs))
        await connection.request(commit, timeout_s=_TIMEOUT_S)

    def _connection(self, shard_id: str) -> ShardConnection:
        if shard_id not in self._connections:
            raise NotFoundError(f"shard {shard_id} is gone", shard_id=shard_id)
        return self._connections[shard_id]


_MAGIC = b"SLIPTQ2\n"
_PREFIX = struct.Struct("<QQ")
_MAX_RECORD_BYTES = 1 << 30


class RecordWriter:
    """Writes records; see ``open``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator["RecordWriter"]:
        """Writes to a draft, which replaces ``path`` only if the block ends without an error."""
        draft = path.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.write(_MAGIC)
                yield cls(file)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)  # on a full disk, its bytes are needed
            raise

    async def write(self, record: list[object]) -> None:
        await self.write_bytes(msgpack.packb(record))

    async def write_bytes(self, data: bytes) -> None:
        prefix = _PREFIX.pack(len(data), codec.checksum(data))
        await asyncio.to_thread(self._file.writelines, (prefix, data))


class RecordReader:
    """Reads records; see ``open``."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator["RecordReader"]:
        """Opens ``path`` for reading.

        Raises:
            DataLossError: If it does not hold records.
        """
        with path.open("rb") as file:
            reader = cls(file, path.name)
            if file.read(len(_MAGIC)) != _MAGIC:
                raise reader.corruption_error()
            yield reader

    async def read(self) -> list[object]:
        """Returns the next record.

        Raises:
            DataLossError: If it is damaged or missing.
        """
        record = msgpack.unpackb(await self._next())
        if not isinstance(record, list) or not record:
            raise self.corruption_error()
        return record

    async def read_bytes(self, size_bytes: int) -> bytes:
        """Returns the next record as bytes, which must have this size.

        Raises:
            DataLossError: If it is damaged or missing.
        """
        data = await self._next()
        if len(data) != size_bytes:
            raise self.corruption_error()
        return data

    def corruption_error(self) -> DataLossError:
        return DataLossError(
            f"{self._name} is corrupted or truncated near byte {self._file.tell()}; "
            "use an older snapshot",
            name=self._name,
        )

    async def _next(self) -> bytes:
        prefix = self._file.read(_PREFIX.size)
        if len(prefix) != _PREFIX.size:
            raise self.corruption_error()
        size, checksum = _PREFIX.unpack(prefix)
        if size > _MAX_RECORD_BYTES:
            raise self.corruption_error()
        data = await asyncio.to_thread(self._file.read, size)
        if len(data) != size or codec.checksum(data) != checksum:
            raise self.corruption_error()
        return data


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Snapshots:
    """Saves and restores snapshots of one transferqueue."""

    def __init__(self, folder: Path, index: Index, shards: Shards) -> None:
        self._folder = folder
        self._index = index
        self._shards = shards
        self._turns: MutableMapping[Path, asyncio.Lock] = WeakValueDictionary()

    async def save(self, run_id: str, snapshot_id: str) -> tuple[int, int]:
        """Saves a run. The file appears under its name only after it is complete.

        Returns:
            Number of samples and of bytes.
        """
        path = self._path(run_id, snapshot_id)
        turn = self._turns.setdefault(path, asyncio.Lock())
        # The call of a lost controller may still be writing.
        async with turn:
            return await self._save(run_id, path)

    async def _save(self, run_id: str, path: Path) -> tuple[int, int]:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        num_keys = 0
        with self._shards.defer_deletion():
            images = self._index.export(run_id)
            async with BlobClient.connect(self._shards) as blobs, RecordWriter.open(path) as writer:
                for image in images:
                    await writer.write(["partition", *_describe(image)])
                    for meta in image.puts:
                        num_keys += meta.num_keys
                        await _save_put(meta, blobs, writer)
                await writer.write(["end", num_keys])
        return num_keys, (await asyncio.to_thread(path.stat)).st_size

    async def restore(self, run_id: str, snapshot_id: str) -> int:
        """Restores a run; returns the number of samples. If it fails, it drops the partitions it created.

        Raises:
            NotFoundError: If there is no such snapshot.
            AlreadyExistsError: If the run has samples.
            DataLossError: If the file is damaged.
        """
        path = self._path(run_id, snapshot_id)
        if not path.exists():
            raise NotFoundError(f"snapshot {snapshot_id!r} of {run_id} not found", run_id=run_id)
        before = self._index.export(run_id)
        if any(image.puts for image in before):
            raise AlreadyExistsError(
                f"{run_id} has samples; drop its partitions before restoring it", run_id=run_id
            )
        try:
            return await self._restore(path)
        except BaseException:
            partition_ids = {image.partition_id for image in before}
            for image in self._index.export(run_id):
                if image.partition_id not in partition_ids:
                    self._index.drop_partition(image.partition_id)
            raise

    async def _restore(self, path: Path) -> int:
        num_keys = 0
        image: PartitionImage | None = None
        async with BlobClient.connect(self._shards) as blobs, RecordReader.open(path) as reader:
            while True:
                kind, *fields = await reader.read()
                if kind == "put":
                    (data,) = fields
                    assert isinstance(data, bytes)
                    num_keys += await self._restore_put(data, blobs, reader)
                    continue
                if image is not None:
                    self._index.leasing.restore(image.partition_id, image.acked)
                if kind == "end":
                    break
                image = _read_image(fields)
                self._index.create_partition(
                    image.partition_id,
                    required_fields=image.required_fields,
                    quota_bytes=image.quota_bytes,
                )
        if fields != [num_keys]:
            raise DataLossError(f"{path.name} has {num_keys} samples, expected {fields}")
        return num_keys

    async def _restore_put(self, data: bytes, blobs: BlobClient, reader: RecordReader) -> int:
        meta = KVBatchMeta.from_bytes(data)
        shard_id = place(group_of(meta.keys[0]), self._shards.list_shards())
        payload = [await reader.read_bytes(blob.size_bytes) for blob in meta.blobs]
        await blobs.put(shard_id, meta, payload)
        return meta.num_keys

    def _path(self, run_id: str, snapshot_id: str) -> Path:
        for name in (run_id, snapshot_id):
            if not _NAME.fullmatch(name) or name.startswith("."):
                raise InvalidArgumentError(
                    f"invalid snapshot id {name!r}; use letters, digits, '.', '-' and '_'"
                )
        return self._folder / run_id / f"{snapshot_id}.tq"


async def _save_put(meta: KVBatchMeta, blobs: BlobClient, writer: RecordWriter) -> None:
    payload: list[bytes] = []
    columns: list[FieldColumn] = []
    refs: list[BlobRef] = []
    for number, column in enumerate(meta.fields):
        blob = meta.blobs[column.blob_indexes[0]]
        ranges, offsets = _compact(column)
        data = await blobs.read(blob, ranges)
        payload.append(data)
        columns.append(
            replace(column, offsets=offsets, blob_indexes=(number,) * len(column.lengths))
        )
        refs.append(replace(blob, size_bytes=len(data), checksum=blob_checksum(data)))
    packed = replace(meta, fields=tuple(columns), blobs=tuple(refs))
    await writer.write(["put", packed.to_bytes()])
    for data in payload:
        await writer.write_bytes(data)


def _compact(column: FieldColumn) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Returns the ``(offset, size)`` ranges of a blob that a column uses, and new offsets of its rows.

    The offsets are those after the ranges are concatenated.
    """
    row_bytes = codec.ITEM_BYTES[column.dtype] * prod(column.tail_shape)
    ranges: list[tuple[int, int]] = []
    moved: dict[tuple[int, int], int] = {}
    end = 0
    for offset, length in zip(column.offsets, column.lengths, strict=True):
        row = (offset, length * row_bytes)
        if row in moved:
            continue
        moved[row] = end
        end += row[1]
        if ranges and sum(ranges[-1]) == offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + row[1])
        else:
            ranges.append(row)
    offsets = [
        moved[offset, length * row_bytes]
        for offset, length in zip(column.offsets, column.lengths, strict=True)
    ]
    return ranges, tuple(offsets)


def _describe(image: PartitionImage) -> list[object]:
    acked = [[name, list(fields), list(keys)] for name, (fields, keys) in image.acked.items()]
    return [
        image.partition_id,
        list(image.required_fields),
        image.quota_bytes,
        acked,
    ]


def _read_image(fields: Sequence[object]) -> PartitionImage:
    partition_id, required_fields, quota_bytes, acked = fields
    return PartitionImage(
        partition_id=str(partition_id),
        required_fields=tuple(required_fields),  # type: ignore[arg-type]  # the checksum was verified
        quota_bytes=int(quota_bytes),  # type: ignore[call-overload]
        puts=(),
        acked={name: (tuple(f), tuple(keys)) for name, f, keys in acked},  # type: ignore[attr-defined]
    )
