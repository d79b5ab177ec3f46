"""Start and end of a process: reports readiness and waits for shutdown."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.common.errors import UnavailableError
from services.common.host import write_atomically
from services.common.task_group import leaves

logger = logging.getLogger(__name__)
OUTAGE_EXIT: Final = os.EX_TEMPFAIL
"""Exit code of a worker that ends because another service did not answer; it may be started again."""


@contextmanager
def ending_with_outages() -> Iterator[None]:
    """Ends this process with :data:`OUTAGE_EXIT` if the block fails only because a service is unreachable."""
    try:
        yield
    except (UnavailableError, ExceptionGroup) as error:
        causes = leaves(error)
        if not all(isinstance(cause, UnavailableError) for cause in causes):
            raise
        logger.error("this worker ends, and may start again", extra={"cause": str(causes[0])})  # noqa: TRY400
        sys.exit(OUTAGE_EXIT)


async def wait_for_shutdown(*, stop_on_stdin_eof: bool = False) -> None:
    """Returns at SIGTERM or SIGINT or, if requested, when standard input ends.

    A parent only has to keep the other end of standard input open: when it dies, for any reason,
    its children end, too.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if stop_on_stdin_eof:
        loop.add_reader(sys.stdin.fileno(), _stop_at_end, loop, stopped)
    await stopped.wait()


def report_ready(ready_file: Path | None, addresses: Mapping[str, str]) -> None:
    """Writes the bound addresses as one line of JSON; atomic for readers."""
    if ready_file is not None:
        write_atomically(ready_file, json.dumps(dict(addresses)) + "\n")


def _stop_at_end(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stopped.set()
