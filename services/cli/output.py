"""Output of all commands: escaped for terminals, and never blocked by a slow reader."""

import errno
import io
import os
import queue
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import IO, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Max pieces of output that wait for their reader; after that, writers block.
_MAX_WAITING = 100_000
# Seconds that a stopped reader has to read the remaining output of a command that was ended.
_LAST_CHANCE_S = 1.0
TELL_EVERY_S = 1.5
"""Seconds between updates of a status line on a terminal."""
REPEAT_EVERY_S = 30.0
"""Seconds between lines about unchanged progress on other outputs."""


_STDOUT, _STDERR = 1, 2
_MAX_SHOWN_BYTES = 64 << 10
# Control characters except newline and tab, line separators, surrogates, and characters that
# reorder a line (Unicode's bidirectional controls, CVE-2021-42574).
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Replaces each character that a terminal would interpret by ``\\uXXXX``.

    A model, a user's code or an error message may contain escape sequences that set the title, clear the
    screen or write to the clipboard (OSC 52). JSON remains valid JSON with the same value.
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class _Terminal(Console):
    """Prints text literally after :func:`printable`: no markup, no emoji names, no highlighting.

    If the reader of standard output has gone, it raises BrokenPipeError; rich's own console would
    end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escapes the text of every segment; rich's own control segments pass unchanged."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Discards the buffered text and re-raises the current BrokenPipeError."""
        del self._buffer[:]
        if not self.stderr:
            raise


for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper):
        # An output that is not UTF-8 gets escapes for the characters that it lacks.
        _stream.reconfigure(errors="backslashreplace")
# Programs read piped output, so lines are not wrapped to a screen.
console = _Terminal(width=None if sys.stdout.isatty() else 1000)
errors = _Terminal(stderr=True)


@contextmanager
def escaping_descriptors() -> Iterator[None]:
    """Collects what this process and its children write in the block, and prints it escaped after it.

    A user's function that is tried prints rows, which may come from anybody.
    """
    with tempfile.TemporaryFile() as file:
        copies = {descriptor: os.dup(descriptor) for descriptor in (_STDOUT, _STDERR)}
        sys.stdout.flush()
        for descriptor in copies:
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, copy in copies.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            escaped_text = file.read(_MAX_SHOWN_BYTES).decode(errors="replace")
            errors.print(escaped_text, end="", soft_wrap=True)


class _Output(io.TextIOBase):
    """A file whose writes return immediately; a thread waits for the reader.

    Args:
        descriptor: File descriptor that the thread writes to.
        on_reader_gone: Called once, by the thread, when the reader has gone; later text then
            goes to standard error. Without it, writing raises BrokenPipeError.
    """

    def __init__(self, descriptor: int, on_reader_gone: Callable[[], None] | None = None) -> None:
        self._descriptor = descriptor
        self._on_reader_gone = on_reader_gone
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._is_broken = False
        # A daemon thread that is killed at exit loses only text that no reader has taken.
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Queues a text for writing.

        Raises:
            BrokenPipeError: If the reader has gone and there is no ``on_reader_gone``.
        """
        if not self._is_broken:
            self._waiting.put(text)
        elif self._on_reader_gone is None:
            raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")
        return len(text)

    def finish(self, timeout_s: float | None) -> None:
        """Waits until the reader has taken all text, or until a time-out."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (text := self._waiting.get()) is not None:
            if self._is_broken:
                continue  # writers may be waiting for free space
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
    """Lets writers of a console continue after its reader has gone; finally waits for the reader.

    Args:
        on_reader_gone: See :class:`_Output`.
    """
    try:
        descriptor = console.file.fileno()
    except OSError:  # the file has no descriptor
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
    """Prints a sentence without wrapping it."""
    console.print(text, soft_wrap=True)


def write(text: str) -> None:
    """Writes lines for a program, such as JSON or an id, to standard output."""
    console.file.write(f"{printable(text)}\n")


@contextmanager
def describe(activity: str, console: Console) -> Iterator[None]:
    """Shows an activity and its duration until the block ends: in place on a terminal, else as lines."""
    is_done = threading.Event()
    begin = time.monotonic()
    status: AbstractContextManager[Any]
    show: Callable[[str], None]
    if console.is_terminal:
        status = display = console.status(activity, refresh_per_second=4)
        every_s, show = TELL_EVERY_S, display.update
    else:
        print_line(console, activity)
        status, every_s, show = nullcontext(), REPEAT_EVERY_S, partial(print_line, console)

    def tick() -> None:
        with suppress(BrokenPipeError):  # the next write raises it again
            while not is_done.wait(every_s):
                show(f"{activity}, {time.monotonic() - begin:.0f} s")

    with status:
        # A thread, because the activity may block an event loop or have none.
        threading.Thread(target=tick, name="describe", daemon=True).start()
        try:
            yield
        finally:
            is_done.set()


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an unexpected error; used as ``sys.excepthook``."""
    errors.print("".join(traceback.format_exception(kind, error, trace)), soft_wrap=True)


def fail(problem: str) -> None:
    """Prints an error message to standard error."""
    errors.print(f"error: {problem}", style="red", soft_wrap=True)


def label_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Returns the labels of ``--label KEY=VALUE``."""
    if wrong := [text for text in texts if "=" not in text]:
        raise typer.BadParameter(f"--label {wrong[0]}: expected KEY=VALUE, such as team=blue")
    return dict(text.split("=", 1) for text in texts)
