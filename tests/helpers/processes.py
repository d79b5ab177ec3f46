"""Processes that a test started, as they come and go."""

from collections.abc import Iterator
from contextlib import suppress

import psutil


def below(
    root: psutil.Process, *, recursive: bool = True
) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Live processes below another, or only its children, each with its command line."""
    for process in root.children(recursive=recursive):
        # It may end while it is looked at, and before whoever started it has seen that.
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            yield process, process.cmdline()
