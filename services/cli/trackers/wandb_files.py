"""What wandb has written of a run that it keeps here to send it later: LevelDB's log of its own records.

Its process ends with the one that uses it, and drops what it had not written: the file is the truth.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

_BLOCK = 1 << 15
_FILE_HEADER = 7
_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a piece of a record."""
_WHOLE, _LAST = 1, 4


def rows_of(folder: Path, run_id: str) -> Iterator[Any]:
    """Rows that are kept of a run, of every time that it was opened, in order."""
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield record


def _records(data: bytes) -> Iterator[bytes]:
    """Whole records of a log."""
    position, record = _FILE_HEADER, b""
    while position + _HEADER.size <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _HEADER.size:
            position += room
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        begin, position = position + _HEADER.size, position + _HEADER.size + length
        if position > len(data):
            return
        record += data[begin:position]
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
