"""Protocol of a recorder of steps, which writes what each step depended on (``record``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.common.callables import load_callable
from services.common.runspec.run import RECORDERS, RunSpec
from services.trainer.engines.base import TrainEngine
from services.trainer.steps.step import StepResult
from services.trainer.transfers import Fetch
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand


class StepRecorder(Protocol):
    """Records the steps of one rank."""

    written_s: float
    """CPU seconds that the newest complete record of a step took beside the training."""

    def begin(self, step: int, spec: RunSpec, engine: TrainEngine) -> None:
        """Records a start that continues after ``step``; all ranks call it."""

    def recorded(self, fetch: Fetch) -> Fetch:
        """Returns a fetch that also records what it fetched."""

    def finish(self, command: StepCommand, result: StepResult, *, engine: TrainEngine) -> None:
        """Records a trained step; may wait for the record of the step before."""

    def accumulated(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Records groups that were trained before their batch was complete."""

    def wait(self) -> None:
        """Waits until everything is written."""


RecorderMaker = Callable[[Path, int, TrainEngine], StepRecorder]
"""Takes the folder of the checkpoints, this process's rank and the engine of the policy."""


def prepare_recorder(spec: RunSpec) -> RecorderMaker | None:
    """Returns what makes the recorder that ``record`` names, or None; call it before a model is loaded."""
    if spec.record == "off":
        return None
    maker: RecorderMaker = load_callable(RECORDERS[spec.record])(spec)
    return maker
