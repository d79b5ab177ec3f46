"""Reader of offline runs that wandb stores locally to send later: wandb's records in LevelDB's log format.

Wandb's process ends with its parent and drops unwritten records, so the file is the source of
truth.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

_BLOCK = 1 << 15
_FILE_HEADER = 7
_HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a fragment of a record."""
_WHOLE, _LAST = 1, 4


def rows_of(folder: Path, run_id: str) -> Iterator[Any]:
    """Yields the stored rows of a run, of all times that it was opened, in order."""
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield record


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records of a log."""
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
