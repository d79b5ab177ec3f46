"""A process that ends with whoever started it."""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


async def run_to_end(
    *arguments: str, log: Path, grace_s: float, environment: Mapping[str, str]
) -> int:
    """Run a module of Python to its end; if this is cancelled it is asked to end, then killed.

    It reads standard input, whose end tells that this process is gone.

    Args:
        arguments: The module, and what it is given.
        log: Where its output goes.
        grace_s: Seconds that it has to end when it is asked.
        environment: What differs from this process's own.

    Returns:
        Its exit code; of a signal that ended it, the negative number.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *arguments),
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await _end(process, grace_s)


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
