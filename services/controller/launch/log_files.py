"""Ends of log files."""

import os
from pathlib import Path

_LAST_LINES = 15
_BLOCK_BYTES = 1 << 16


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """The end of a log file, however long the file is; empty if there is none."""
    if not log.exists():
        return ""
    data = b""
    with log.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        # One more line end than lines: what stands before the first of them may be half a line.
        while begin > 0 and data.count(b"\n") <= count:
            end, begin = begin, max(begin - _BLOCK_BYTES, 0)
            file.seek(begin)
            data = file.read(end - begin) + data
    return b"\n".join(data.rstrip().split(b"\n")[-count:]).decode(errors="replace")
