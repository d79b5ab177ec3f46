"""Processor seconds of each kind of process of a run."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_KIND = re.compile(r"services\.([a-z_.]+)|(VLLM::\S+)")
_POLL_S = 1.0


class Processors:
    """Samples all processes of this host once per second.

    Attributes:
        shares: By kind, the CPU share of the kind's busiest process in each second.
    """

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {}
        self._used_s: dict[int, float] = {}
        self._done = threading.Event()

    def medians(self, *, last_s: int) -> dict[str, float]:
        """Returns the median of each kind over the newest seconds."""
        return {
            kind: round(sorted(values[-last_s:])[len(values[-last_s:]) // 2], 2)
            for kind, values in sorted(self.shares.items())
            if values
        }

    def watch(self) -> None:
        """Samples until :meth:`stop`."""
        while not self._done.wait(_POLL_S):
            busiest: dict[str, float] = {}
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if (kind := _kind(process)) is None:
                        continue
                    times = process.cpu_times()
                    used = times.user + times.system
                    spent = used - self._used_s.get(process.pid, used)
                    self._used_s[process.pid] = used
                    busiest[kind] = max(busiest.get(kind, 0.0), spent / _POLL_S)
            for kind, share in busiest.items():
                self.shares.setdefault(kind, []).append(share)

    def stop(self) -> None:
        """Stops sampling."""
        self._done.set()


@contextmanager
def watched() -> Iterator[Processors]:
    """Samples while the block runs."""
    processors = Processors()
    thread = threading.Thread(target=processors.watch, daemon=True)
    thread.start()
    try:
        yield processors
    finally:
        processors.stop()
        thread.join()


def _kind(process: psutil.Process) -> str | None:
    match = _KIND.search(" ".join(process.cmdline()) or process.name())
    return None if match is None else match[1] or match[2]
