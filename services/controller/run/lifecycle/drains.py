"""Hosts that leave a run: their workers move to other hosts and lose no step.

::

    only rollouts leave, others stay   -> they are detached and replaced while the run trains
                                          (``elastic.py``)
    other workers leave, or all        -> the step in progress ends; a checkpoint is saved; the loops are
    rollouts                              left; the workers end and start elsewhere; the loops are entered
    the checkpoint fails, or would be  -> no worker moves; the event ``Draining`` says why; the next notice of
    lost with the trainer                 the launcher tries again

The launcher repeats its notice as long as the host is drained, so nothing of this is stored.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.controller.store.records import Note


class HostDrainedError(Exception):
    """Raised if workers must leave their hosts before the loops of the run are entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedHost:
    """A host that is to be removed or restarted."""

    name: str
    reason: str
    """Mark of the node, such as ``cordoned`` or the key of a taint."""
    since: float
    """Time at which it was first seen, in seconds since the epoch."""


@dataclass(slots=True)
class HostDrains:
    """Drained hosts of one run, and the workers that have not left them yet."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each notice."""
    is_held: bool = False
    """True if an obstacle keeps the workers until the next notice."""
    _hosts: dict[str, DrainedHost] = field(default_factory=dict)
    _workers: dict[str, set[str]] = field(default_factory=dict)
    _last_report: tuple[str, str] = ("", "")

    def add(self, host: DrainedHost, worker_ids: Collection[str]) -> None:
        """Adds workers of a drained host."""
        self._hosts.setdefault(host.name, host)
        self._workers.setdefault(host.name, set()).update(worker_ids)
        self.is_held = False
        self.changed.set()

    def withdraw(self, host: str) -> set[str]:
        """Forgets a host that is in service again; returns its workers that had not left."""
        self._hosts.pop(host, None)
        return self._workers.pop(host, set())

    def left(self, worker_ids: Collection[str]) -> list[str]:
        """Removes workers that have left; returns the hosts that have no more workers of the run."""
        for workers in self._workers.values():
            workers.difference_update(worker_ids)
        empty = [name for name, workers in self._workers.items() if not workers]
        for name in empty:
            self.withdraw(name)
        if not self._hosts:
            self._last_report = ("", "")
        return empty

    def leaving(self) -> set[str]:
        """Returns the workers that have not left their drained hosts."""
        return set().union(*self._workers.values())

    def note(self, *, obstacle: str = "", why: str = "") -> Note | None:
        """Returns the event of the drain; None if the newest one says the same.

        Args:
            obstacle: Code of the reason for which the workers stay; empty if they move.
            why: Explanation of the obstacle and what to do.
        """
        workers = ", ".join(sorted(self.leaving()))
        hosts = "; ".join(f"{name} ({host.reason})" for name, host in sorted(self._hosts.items()))
        self.is_held = bool(obstacle)
        report = (obstacle, f"{hosts} {workers}")
        if report == self._last_report:
            return None
        self._last_report = report
        message = f"drained: {hosts}; {workers} "
        message += f"stay: {why}" if obstacle else "leave"
        return Note("Draining", message, self._data(obstacle or "HostDrained"))

    def _data(self, reason: str) -> Mapping[str, object]:
        return {
            "reason": reason,
            "hosts": [
                {"name": host.name, "reason": host.reason, "since": host.since}
                for host in self._hosts.values()
            ],
            "workers": sorted(self.leaving()),
        }


def left_note(hosts: Collection[str], worker_ids: Collection[str]) -> Note:
    """Returns the event after which hosts have no more workers of the run."""
    names, workers = sorted(hosts), sorted(worker_ids)
    message = f"{', '.join(workers)} left {', '.join(names)}"
    return Note("Drained", message, {"reason": "Left", "hosts": names, "workers": workers})


def withdrawn_note(host: str, worker_ids: Collection[str]) -> Note:
    """Returns the event that a host is in service again before its workers have left."""
    workers = sorted(worker_ids)
    message = f"{host} is in service again; {', '.join(workers)} stay"
    return Note("Drained", message, {"reason": "InService", "hosts": [host], "workers": workers})
