"""Observers of a run: extras that follow its steps, such as the live advice of the planner."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from services.common.callables import load_callable
from services.common.doors import References
from services.common.host import Clock
from services.common.task_group import TaskGroup
from services.controller.rules.ledger import Ledger
from services.controller.run.observe.progress import Progress
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec

logger = logging.getLogger(__name__)

OBSERVERS: Final = References("run_observers")
"""Functions that take :class:`ObserverArgs` and return a :class:`RunObserver`."""
# Short runs end before an observer is imported, whose import would delay their steps.
_IMPORT_AFTER_S = 60.0
_REMEMBERED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverArgs:
    """Parts of a run that an observer reads; it may write to the progress and the journal."""

    spec: CurrentSpec
    journal: Journal
    progress: Progress
    ledger: Ledger
    clock: Clock
    gpus: Callable[[], int | None]
    """Returns the number of GPUs that the run may use; None if only its current GPUs are known."""


class RunObserver(Protocol):
    """Follows the steps of one run."""

    def reset(self) -> None:
        """Discards what is known of earlier steps, because the run's workers changed."""

    def record_step(self, numbers: Mapping[str, Any]) -> None:
        """Records the metrics and histograms of a committed step."""

    async def watch(self) -> None:
        """Works until it is cancelled."""


@dataclass(slots=True)
class Observers:
    """All installed observers of one run. One that fails is logged and left out; the run continues."""

    args: ObserverArgs
    _steps: deque[Mapping[str, Any]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), init=False
    )
    """Newest steps, for observers that are not imported yet."""
    _observers: list[RunObserver] = field(default_factory=list, init=False)

    def reset(self) -> None:
        self._steps.clear()
        for observer in self._observers:
            observer.reset()

    def record_step(self, numbers: Mapping[str, Any]) -> None:
        self._steps.append(numbers)
        for observer in self._observers:
            observer.record_step(numbers)

    async def watch(self) -> None:
        """Imports the observers after the first minute, and runs them until it is cancelled."""
        if not self._observers:
            await asyncio.sleep(_IMPORT_AFTER_S)
            self._observers = self._opened()
            for observer in self._observers:
                for numbers in self._steps:
                    observer.record_step(numbers)
        async with TaskGroup() as tasks:
            for observer in self._observers:
                tasks.create_task(_watched(observer))

    def _opened(self) -> list[RunObserver]:
        observers = []
        for name, reference in OBSERVERS.items():
            try:
                observers.append(load_callable(reference)(self.args))
            except Exception:  # another package's code
                logger.exception("cannot open a run observer", extra={"observer": name})
        return observers


async def _watched(observer: RunObserver) -> None:
    try:
        await observer.watch()
    except Exception:  # another package's code
        logger.exception("a run observer failed", extra={"observer": type(observer).__name__})
