"""Logs of a run's workers: the last lines, and new lines live.

Processes write these files directly; the extra ``kubernetes`` copies the output of pods into them.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from services.controller.launch.worker_process import last_lines
from services.controller.schemas import LogLine

# Logs are polled, because asyncio does not report that a file grows.
_POLL_S = 0.5
_MAX_READ_BYTES = 1 << 18
_MAX_TAIL_BYTES = 4 << 20
"""Max bytes of past lines of each worker."""
_BATCH_LINES = 1000
_OFFSET = re.compile(r"([a-z0-9-]{1,63}):(\d{1,18})")


class RunLogs:
    """Reads the logs of workers.

    Args:
        state_directory: Root of the logs: each run's are in ``<state_directory>/<run_id>/logs``.
    """

    def __init__(self, state_directory: Path, is_ended: Callable[[str], Awaitable[bool]]) -> None:
        self._state_directory = state_directory
        self._is_ended = is_ended

    async def tail(
        self, run_id: str, component: str, num_lines: int
    ) -> AsyncIterator[list[LogLine]]:
        """Yields the last lines of one worker, or of every worker if ``component`` is empty, in batches."""
        for log in self._files(run_id, component):
            tail_lines = (await asyncio.to_thread(_tail, log, num_lines)).splitlines()
            for first in range(0, len(tail_lines), _BATCH_LINES):
                lines = tail_lines[first : first + _BATCH_LINES]
                yield [LogLine(component=log.stem, line=line) for line in lines]

    async def follow(
        self, run_id: str, component: str, num_lines: int, cursor: str
    ) -> AsyncIterator[list[tuple[str, LogLine]]]:
        """Streams the last lines, then new ones, until the run has ended.

        Args:
            component: Name of one worker; empty for all.
            num_lines: Past lines of each worker that the cursor does not cover.
            cursor: Cursor that an earlier call yielded last; empty at first.

        Yields:
            A possibly empty batch of ``(cursor, line)``; the cursor of the last line resumes after it, the
            other cursors are empty.
        """
        offsets = {name: int(offset) for name, offset in _OFFSET.findall(cursor)}
        is_last = False
        while not is_last:
            # Checked before reading, so that lines written before the end are still read.
            is_last = await self._is_ended(run_id)
            has_more = False
            for log in self._files(run_id, component):
                name = log.stem
                if name not in offsets:
                    offsets[name] = await asyncio.to_thread(_tail_offset, log, num_lines)
                lines, end = await asyncio.to_thread(_read, log, offsets[name])
                has_more |= end - offsets[name] > _MAX_READ_BYTES // 2
                offsets[name] = end
                if lines:
                    *earlier_lines, last = (LogLine(component=name, line=line) for line in lines)
                    yield [*(("", line) for line in earlier_lines), (_cursor(offsets), last)]
            is_last = is_last and not has_more
            yield []
            if not (is_last or has_more):
                await asyncio.sleep(_POLL_S)

    async def delete(self, run_id: str) -> None:
        """Deletes the logs of a run, and its folder if nothing else is in it."""
        folder = self._state_directory / run_id

        def remove() -> None:
            shutil.rmtree(folder / "logs", ignore_errors=True)
            with suppress(OSError):  # it holds checkpoints, or does not exist
                folder.rmdir()

        await asyncio.to_thread(remove)

    def _files(self, run_id: str, component: str) -> list[Path]:
        logs = sorted((self._state_directory / run_id / "logs").glob("*.log"))
        return [log for log in logs if component in ("", log.stem)]


def _tail(log: Path, num_lines: int) -> str:
    return last_lines(log, num_lines, max_bytes=_MAX_TAIL_BYTES)


def _tail_offset(log: Path, num_lines: int) -> int:
    """Returns the offset at which the last lines of a file begin."""
    if num_lines == 0:
        return log.stat().st_size
    num_bytes = len(_tail(log, num_lines).encode())
    return max(log.stat().st_size - num_bytes - 1, 0)


def _read(log: Path, offset: int) -> tuple[list[str], int]:
    """Reads whole lines from an offset; returns them and the next offset.

    A truncated file is read from its start again.
    """
    with log.open("rb") as file:
        file.seek(offset if offset <= log.stat().st_size else 0)
        begin = file.tell()
        data = file.read(_MAX_READ_BYTES)
    end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MAX_READ_BYTES else 0)
    text = data[:end].decode(errors="replace")
    return [line for line in text.splitlines() if line], begin + end


def _cursor(offsets: dict[str, int]) -> str:
    return ",".join(f"{name}:{offset}" for name, offset in offsets.items())
