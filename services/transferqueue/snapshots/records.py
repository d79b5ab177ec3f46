"""File of checksummed records that detects damaged and missing ones."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgpack

from services.common.errors import DataLossError
from services.wire.data.encoding import codec

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
        with draft.open("wb") as file:
            file.write(_MAGIC)
            yield cls(file)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        draft.replace(path)

    async def write(self, record: list[object]) -> None:
        """Appends a record."""
        await self.write_bytes(msgpack.packb(record))

    async def write_bytes(self, data: bytes) -> None:
        """Appends bytes as a record."""
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
                raise reader.damage()
            yield reader

    async def read(self) -> list[object]:
        """Returns the next record.

        Raises:
            DataLossError: If it is damaged or missing.
        """
        record = msgpack.unpackb(await self._next())
        if not isinstance(record, list) or not record:
            raise self.damage()
        return record

    async def read_bytes(self, size_bytes: int) -> bytes:
        """Returns the next record as bytes, which must have this size.

        Raises:
            DataLossError: If it is damaged or missing.
        """
        data = await self._next()
        if len(data) != size_bytes:
            raise self.damage()
        return data

    def damage(self) -> DataLossError:
        """Returns the error for a damaged file."""
        return DataLossError(
            f"{self._name} is damaged or was cut off near byte {self._file.tell()}; "
            "use an older snapshot",
            name=self._name,
        )

    async def _next(self) -> bytes:
        prefix = self._file.read(_PREFIX.size)
        if len(prefix) != _PREFIX.size:
            raise self.damage()
        size, checksum = _PREFIX.unpack(prefix)
        if size > _MAX_RECORD_BYTES:
            raise self.damage()
        data = await asyncio.to_thread(self._file.read, size)
        if len(data) != size or codec.checksum(data) != checksum:
            raise self.damage()
        return data
