"""Events about the weight store: it fails for a member, or works again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from services.common.stores import without_secrets
from services.controller import metrics
from services.controller.run.weights.session import WeightSession
from services.controller.store.records import Note

_EVERY_S: Final = 1.0
_TOLD_AFTER_S: Final = 10.0
"""Seconds of failure after which an event reports it; shorter ones only show in metrics."""


@dataclass(slots=True)
class StoreReports:
    """Reports of the members that use a weight store.

    Args:
        directory: Folder of the versions, or its URL.
    """

    run_id: str
    directory: str
    weights: WeightSession
    record: Callable[[Note], Awaitable[object]]
    _failing: set[str] = field(default_factory=set, init=False)

    async def watch(self) -> None:
        """Records events until it is cancelled."""
        while True:
            for note in self.notes():
                await self.record(note)
            await asyncio.sleep(_EVERY_S)

    def notes(self) -> Iterator[Note]:
        """Yields what changed since the last call."""
        troubles = self.weights.store_troubles
        longest_s = max((trouble.failing_s for trouble in troubles.values()), default=0.0)
        metrics.STORE_FAILING_SECONDS.labels(self.run_id).set(longest_s)
        where = without_secrets(self.directory) if "://" in self.directory else self.directory
        for name, trouble in troubles.items():
            if trouble.failing_s >= _TOLD_AFTER_S and name not in self._failing:
                self._failing.add(name)
                message = (
                    f"{name} cannot use the weight store for {trouble.failing_s:.0f} s: {trouble.cause}; it "
                    "tries again, and training continues as far as algorithm.max_staleness allows"
                )
                yield Note("WeightStoreFailing", message, {"workers": [name], "url": where})
        for name in sorted(self._failing - troubles.keys()):
            self._failing.discard(name)
            message = f"{name} uses the weight store again"
            yield Note("WeightStoreResumed", message, {"workers": [name], "url": where})


async def report_failures(
    run_id: str,
    directory: str,
    weights: WeightSession,
    *,
    record: Callable[[Note], Awaitable[object]],
) -> None:
    """Records events about the store of a run until it is cancelled."""
    await StoreReports(run_id, directory, weights, record).watch()
