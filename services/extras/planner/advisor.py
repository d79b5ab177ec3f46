"""Reports which side of a run is the bottleneck and which setting would help, when the answer changes."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from services.common.runspec.run import RunSpec, default_slots
from services.common.runspec.worker_kinds import total_gpus
from services.controller.run.observe.observers import ObserverArgs
from services.controller.store.records import Note
from services.extras.planner.advice import Advice, advise
from services.extras.planner.gpu_splits import allows, on_one_gpu, other_placements
from services.extras.planner.inputs import (
    Step,
    TooFewStepsError,
    rates_of,
    setting_of,
    waited_fraction,
)

logger = logging.getLogger(__name__)
_REMEMBERED = 40
_MIN_STEPS = 10
# A prediction takes up to one second of CPU: it is repeated soon if the run has changed, and rarely
# otherwise.
_MIN_PAUSE_S, _MAX_PAUSE_S = 600.0, 3600.0
_MOVED = 0.1


@dataclass(slots=True)
class Advisor:
    """Predicts the bottleneck of one run from the metrics of its newest steps."""

    args: ObserverArgs
    _steps: deque[Mapping[str, Any]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), init=False
    )
    _num_steps: int = field(default=0, init=False)
    _stepped: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _advised_at: float | None = field(default=None, init=False)
    _waited: float = field(default=0.0, init=False)
    _is_predicted: bool = field(default=False, init=False)
    _reported: tuple[object, ...] = field(default=(), init=False)

    def reset(self) -> None:
        """Discards steps and advice after the run's workers changed."""
        self.args.progress.record_advice({})
        self._steps.clear()
        self._num_steps, self._advised_at = 0, None

    def record_step(self, numbers: Mapping[str, Any]) -> None:
        """Records the metrics and histograms of a committed step."""
        self._num_steps += 1
        self._steps.append({**numbers, "step": float(self._num_steps)})
        self._stepped.set()

    async def watch(self) -> None:
        """Updates the advice after each step until it is cancelled."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            await self.update()

    async def update(self) -> None:
        """Updates the advice in a thread, if an update is due."""
        if self._is_due():
            await self._advise()

    def _is_due(self) -> bool:
        # Rollouts only encode the rows of demonstrations: none of the advised keys would change their speed.
        has_samples = self.args.spec.now.algorithm.num_demonstrations == 0
        if not has_samples or self._num_steps < _MIN_STEPS:
            return False
        if self._advised_at is None:
            return True
        passed_s = self.args.clock.monotonic() - self._advised_at
        has_moved = abs(waited_fraction(self._numbers()) - self._waited) >= _MOVED
        is_soon = has_moved or not self._is_predicted
        return passed_s >= (_MIN_PAUSE_S if is_soon else _MAX_PAUSE_S)

    async def _advise(self) -> None:
        steps, spec, setting = self._numbers(), self.args.spec.now, setting_of(self.args.spec.now)
        lengths, gpus = self._lengths(), self.args.gpus()
        if gpus is not None:
            # The GPUs of other task groups, such as a critic's, are not free.
            gpus -= total_gpus(spec) - setting.gpus
        if gpus == 1 < setting.gpus and setting.rollouts == setting.trainer_gpus == 1:
            setting = on_one_gpu(setting) or setting

        def work() -> Advice | None:
            rates = None
            with suppress(TooFewStepsError):  # a metric is missing so far
                rates = rates_of(steps, lengths, setting=setting)
            try:
                return advise(
                    steps,
                    rates,
                    setting,
                    candidates=other_placements(spec, setting),
                    gpus=gpus,
                    allows=partial(allows, spec),
                    slots=_default_slots(spec),
                )
            except ValueError:
                return None

        try:
            advice = await asyncio.to_thread(work)
        except Exception:  # a failed prediction must not end the run
            logger.exception("cannot predict the bottleneck")
            advice = None
        self._advised_at, self._waited = self.args.clock.monotonic(), waited_fraction(steps)
        self._is_predicted = advice is not None and advice.now is not None
        if advice is None:
            return
        texts = {"message": advice.message(), "remedy": advice.remedy()}
        self.args.progress.record_advice({"bottleneck": advice.bottleneck, **texts})
        if advice.first != self._reported:
            self._reported = advice.first
            await self._report(advice)

    async def _report(self, advice: Advice) -> None:
        data = {
            "bottleneck": advice.bottleneck,
            "waited": advice.waited,
            "idled": advice.idled,
            "step_s": advice.measured_step_s,
            "predicted_step_s": None if advice.now is None else advice.now.step_s,
            "changes": [asdict(change) for change in advice.changes],
            "placement": advice.placement,
            "placements": dict(advice.placement_gains),
        }
        summary = self.args.progress.summary(self.args.ledger)
        await self.args.journal.record_event(
            Note("Advice", advice.message(), data, None, None, summary), self.args.ledger
        )

    def _numbers(self) -> list[Step]:
        return [
            {name: value for name, value in step.items() if isinstance(value, int | float)}
            for step in self._steps
        ]

    def _lengths(self) -> Mapping[int, int]:
        """Returns the number of responses by upper bound of their length bucket."""
        histogram: dict[int, int] = {}
        for step in self._steps:
            for bound, count in step.get("histograms", {}).get("response_tokens", {}).items():
                histogram[int(bound)] = histogram.get(int(bound), 0) + count
        return histogram


def _default_slots(spec: RunSpec) -> Callable[[int], int] | None:
    """Returns the function of the staleness bound that gives the slots; None if the user has set them."""

    def follows(bound: int) -> int:
        return default_slots(spec, max_staleness=bound, replicas=spec.rollout.replicas)

    is_default = spec.rollout.max_running_samples == follows(spec.algorithm.max_staleness)
    return follows if is_default else None


def advisor(args: ObserverArgs) -> Advisor:
    """Returns the advisor of one run."""
    return Advisor(args)
