"""Reads the ends of log files."""

import os
from pathlib import Path

_LAST_LINES = 15
_BLOCK_BYTES = 1 << 16


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """Returns the last lines of a log file of any size; empty if the file does not exist."""
    if not log.exists():
        return ""
    data = b""
    with log.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        # One more line end than lines, because the text before the first one may be half a line.
        while begin > 0 and data.count(b"\n") <= count:
            end, begin = begin, max(begin - _BLOCK_BYTES, 0)
            file.seek(begin)
            data = file.read(end - begin) + data
    return b"\n".join(data.rstrip().split(b"\n")[-count:]).decode(errors="replace")
