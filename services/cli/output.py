"""Prints everything that commands print: escaped for the terminal, and without waiting for a slow reader."""

import errno
import io
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Pieces of output that wait for their reader; then whoever writes waits too.
_MAX_WAITING = 100_000
# A reader that has gone to sleep gets this long to take what is left of a command that was ended.
_LAST_CHANCE_S = 1.0
TELL_EVERY_S = 1.5
"""How often what a terminal shows of something that takes long is renewed."""
REPEAT_EVERY_S = 30.0
"""How often output that is no terminal gets a line about something that goes on unchanged."""


_STDERR = 2
# Control characters except newline and tab, line separators, surrogates, and what reorders a line (Unicode's
# bidirectional controls, CVE-2021-42574).
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Replaces each character that a terminal would execute by ``\\uXXXX``.

    A model, a user's code or an error message may contain escape sequences that set the title, clear the
    screen or write to the clipboard (OSC 52). JSON stays valid JSON with the same value.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Terminal(Console):
    """Prints text as it is, except for :func:`printable`: no markup, no emoji names, no highlighting.

    If the reader of standard output has gone, BrokenPipeError is raised; rich's own would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape the text of every segment; rich's own control segments pass."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Forget the text that nobody can read, and raise the BrokenPipeError that is being handled."""
        del self._buffer[:]
        if not self.stderr:
            raise


# Programs read what is piped: lines are not broken for a screen that is not there.
console = _Terminal(width=None if sys.stdout.isatty() else 1000)
errors = _Terminal(stderr=True)


class _Output(io.TextIOBase):
    """A file whose writes return at once: a thread waits for the reader.

    Args:
        descriptor: Where the thread writes.
        on_reader_gone: Called once, by the thread, when the reader has gone; later text then goes to standard
            error. Without it, writing raises BrokenPipeError.
    """

    def __init__(self, descriptor: int, on_reader_gone: Callable[[], None] | None = None) -> None:
        self._descriptor = descriptor
        self._on_reader_gone = on_reader_gone
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
            BrokenPipeError: If the reader has gone and nobody asked to be called then.
        """
        if not self._is_broken:
            self._waiting.put(text)
        elif self._on_reader_gone is None:
            raise BrokenPipeError(errno.EPIPE, "nobody reads any more")
        return len(text)

    def finish(self, timeout_s: float | None) -> None:
        """Wait until everything is read, or for some time."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (text := self._waiting.get()) is not None:
            if self._is_broken:
                continue  # others may be waiting for room
            try:
                self._write(text)
            except OSError:
                if self._on_reader_gone is None or self._descriptor == _STDERR:
                    self._is_broken = True
                    continue
                self._descriptor = _STDERR
                self._on_reader_gone()

    def _write(self, text: str) -> None:
        rest = text.encode(errors="replace")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


@contextmanager
def tolerate_broken_pipe(
    console: Console, on_reader_gone: Callable[[], None] | None = None
) -> Iterator[None]:
    """Let a console's writers go on although nobody reads; at the end, wait for the reader.

    Args:
        console: Whose output it is.
        on_reader_gone: See :class:`_Output`.
    """
    try:
        descriptor = console.file.fileno()
    except OSError:  # not a file of the system's
        yield
        return
    console.file.flush()
    before, output = console.file, _Output(descriptor, on_reader_gone)
    console.file = cast("IO[str]", output)
    timeout_s: float | None = _LAST_CHANCE_S
    try:
        yield
        timeout_s = None
    finally:
        console.file = before
        output.finish(timeout_s)


def print_line(console: Console, text: str) -> None:
    """Print a sentence without breaking it into lines."""
    console.print(text, soft_wrap=True)


def write(text: str) -> None:
    """Write lines for a program, such as JSON or an id, to standard output."""
    console.file.write(f"{printable(text)}\n")


@contextmanager
def describe(what: str, console: Console) -> Iterator[None]:
    """Say what is being done and for how long until the block ends: in place on a terminal, else in lines."""
    is_done = threading.Event()
    begin = time.monotonic()
    status: AbstractContextManager[Any]
    show: Callable[[str], None]
    if console.is_terminal:
        status = shown = console.status(what, refresh_per_second=4)
        every_s, show = TELL_EVERY_S, shown.update
    else:
        print_line(console, what)
        status, every_s, show = nullcontext(), REPEAT_EVERY_S, partial(print_line, console)

    def tick() -> None:
        with suppress(BrokenPipeError):  # whoever writes next is told of it
            while not is_done.wait(every_s):
                show(f"{what}, {time.monotonic() - begin:.0f} s")

    with status:
        # What is done may keep an event loop busy, or have none.
        threading.Thread(target=tick, name="describe", daemon=True).start()
        try:
            yield
        finally:
            is_done.set()


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error that no command expects, as ``sys.excepthook``."""
    errors.print("".join(traceback.format_exception(kind, error, trace)), soft_wrap=True)


def fail(problem: str) -> None:
    """Say what is wrong, on standard error."""
    errors.print(f"error: {problem}", style="red", soft_wrap=True)
