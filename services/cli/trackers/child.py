"""Subprocess that ends when its parent ends."""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


async def run_to_end(
    *arguments: str, log: Path, grace_s: float, environment: Mapping[str, str]
) -> int:
    """Runs a Python module in a subprocess to its end; a cancellation terminates, then kills it.

    The subprocess reads standard input, whose end reports that this process is gone.

    Args:
        arguments: The module and its arguments.
        log: File for its output.
        grace_s: Seconds between termination and kill.
        environment: Variables to add to this process's environment.

    Returns:
        The exit code; if a signal ended the process, the negative signal number.
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
