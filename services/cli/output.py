"""Standard output for commands that must go on while nobody reads it, as when it is piped into a pager."""

import errno
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

from rich.console import Console

# Pieces of output that wait for their reader; then whoever writes waits too.
_MAX_WAITING = 100_000
# A reader that has gone to sleep gets this long to take what is left of a command that was ended.
_LAST_CHANCE_S = 1.0
TELL_EVERY_S = 1.5
"""A person who waits hears something this often, and with what delays it every two seconds."""


class _PipedConsole(Console):
    """Leaves it to its user what becomes of a reader that is gone; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled; what could not be written goes with its reader."""
        del self._buffer[:]
        raise


# What is piped is read by programs too: lines are not broken for a screen that is not there.
console = _PipedConsole(width=None if sys.stdout.isatty() else 1000)
errors = Console(stderr=True)


class _Output(io.TextIOBase):
    """A file whose writes return at once: a thread waits for the reader.

    Args:
        descriptor: Where the thread writes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._is_broken = False
        # Nothing is lost with the thread but what nobody reads.
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What bytes the text becomes."""
        return "utf-8"

    def isatty(self) -> bool:
        """Whether a person reads."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Where it goes."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Have a text written.

        Raises:
            BrokenPipeError: If the reader is gone.
        """
        if self._is_broken:
            raise BrokenPipeError(errno.EPIPE, "nobody reads any more")
        self._waiting.put(text)
        return len(text)

    def finish(self, timeout_s: float | None) -> None:
        """Wait until everything is read, or for some time."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (text := self._waiting.get()) is not None:
            rest = text.encode(errors="replace")
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                self._is_broken = True
                return


@contextmanager
def patient(console: Console) -> Iterator[None]:
    """Let a console's writers go on although nobody reads; at the end, wait for the reader."""
    try:
        descriptor = console.file.fileno()
    except OSError:  # not a file of the system's
        yield
        return
    console.file.flush()
    before, output = console.file, _Output(descriptor)
    console.file = cast("IO[str]", output)
    timeout_s: float | None = _LAST_CHANCE_S
    try:
        yield
        timeout_s = None
    finally:
        console.file = before
        output.finish(timeout_s)


def say(console: Console, text: str) -> None:
    """Print a sentence as it is: neither coloured nor broken into lines."""
    console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def told(what: str, console: Console) -> Iterator[None]:
    """Say what is being done, and again and again for how long, until the block ends."""
    say(console, what)
    is_done = threading.Event()

    def tick() -> None:
        begin = time.monotonic()
        with suppress(BrokenPipeError):  # whoever writes next is told of it
            while not is_done.wait(TELL_EVERY_S):
                say(console, f"{what}, {time.monotonic() - begin:.0f} s")

    # What is done may keep an event loop busy, or have none.
    threading.Thread(target=tick, name="told", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def fail(problem: str) -> None:
    """Say what is wrong, on standard error."""
    errors.print(f"error: {problem}", style="red", soft_wrap=True, highlight=False, markup=False)
