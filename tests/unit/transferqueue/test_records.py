"""Record files detect damage."""

from pathlib import Path

import pytest

from services.common.errors import DataLossError
from services.transferqueue.snapshots.snapshots import RecordReader, RecordWriter


async def write(path: Path) -> None:
    async with RecordWriter.open(path) as writer:
        await writer.write(["first", 1, b"x"])
        await writer.write_bytes(b"bytes")
        await writer.write(["end"])


async def read(path: Path) -> list[object]:
    async with RecordReader.open(path) as reader:
        return [await reader.read(), await reader.read_bytes(5), await reader.read()]


async def test_records_are_read_unchanged(tmp_path: Path) -> None:
    await write(tmp_path / "a")
    assert await read(tmp_path / "a") == [["first", 1, b"x"], b"bytes", ["end"]]


async def test_any_changed_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await write(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataLossError):
            await read(path)
        path.write_bytes(whole[:position])
        with pytest.raises(DataLossError):
            await read(path)


async def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    await write(path)
    with pytest.raises(RuntimeError):
        async with RecordWriter.open(path) as writer:
            await writer.write(["half"])
            raise RuntimeError
    assert len(await read(path)) == 3
