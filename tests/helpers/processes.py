"""Processes that a test started."""

from collections.abc import Iterator
from contextlib import suppress

import psutil


def below(
    root: psutil.Process, *, recursive: bool = True
) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yields the live descendants of a process, or only its children, with their command lines."""
    for process in root.children(recursive=recursive):
        # A process may end during the inspection, or be a zombie until its parent reaps it.
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            yield process, process.cmdline()
