"""Rank 0 towards the outside: steps in order and once, weights only between steps."""

import asyncio
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from services.common.batch import KVBatchMeta
from services.common.errors import FailedPreconditionError, UnavailableError
from services.trainer.checkpoint.checkpointer import Snapshot
from services.trainer.model.host_copy import OffloadedState
from services.trainer.phases import IdleClock, PhaseTimer
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.ranks.rank import Rank
from services.trainer.steps.fields import FieldScoring
from services.trainer.steps.step import StepResult
from services.trainer.weights import WeightExport
from services.weightsync.canary import Canary
from services.weightsync.plan import TensorSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is safe on disk."""

    folder: Path
    seconds: Mapping[str, float]
    """Time by phase: the ``snapshot`` blocked training, the ``write`` did not."""
    num_bytes: int
    """Its size."""
    free_bytes: int
    """Room that is left beside it."""


class Leader:
    """Serves steps and weights; until :meth:`attach` it answers that it still loads.

    Args:
        may_miss_steps: Whether a step need not follow the newest one: a critic that was lost goes on without
            those since its checkpoint.
    """

    def __init__(self, *, may_miss_steps: bool = False) -> None:
        self._may_miss_steps = may_miss_steps
        self._rank: Rank | None = None
        self._weights: WeightExport | None = None
        self._values: FieldScoring | None = None
        self._state: OffloadedState | None = None
        self._command_group = CommandGroup(1)
        self._newest: tuple[int, StepResult | None] = (0, None)
        self._newest_version = 0
        self._begun: tuple[int, Future[StepResult]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        # Training changes the weights that a transfer copies; both run in threads.
        self._turn = threading.Lock()
        self._steps = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._idle = IdleClock()

    def attach(
        self,
        rank: Rank,
        command_group: CommandGroup,
        *,
        weights: WeightExport | None = None,
        values: FieldScoring | None = None,
        state: OffloadedState | None = None,
        step: int = 0,
    ) -> None:
        """Start to answer, with the other ranks following.

        Args:
            rank: This process's part.
            command_group: The other ranks.
            weights: The policy's weights; a critic's go nowhere.
            values: Scores batches, of a critic.
            state: The policy's state, which can be moved to host memory.
            step: Newest step that is trained already.
        """
        self._newest = (step, None)
        self._command_group = command_group
        self._weights = weights
        self._values = values
        self._state = state
        self._rank = rank

    async def train_step(
        self,
        step: int,
        meta: KVBatchMeta,
        *,
        weight_version: int | None = None,
        num_steps: int | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> StepResult:
        """Train a step, or repeat the answer of the newest one.

        A step that was begun is finished and counted even if the caller is gone: a controller that was
        started again asks for the same step and gets its answer.

        Raises:
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the model is not loaded yet, or a rank is gone.
        """
        async with self._steps:
            if self._begun is None or self._begun[0] != step or self._begun[1].done():
                self._begun = (
                    step,
                    self._begin(step, meta, weight_version, num_steps, waits or {}),
                )
            return await _shielded(self._begun[1])

    async def accumulate(self, step: int, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Begin with some groups of the next step, while its others are generated. Safe to repeat.

        Raises:
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the model is not loaded yet, or a rank is gone.
        """
        self._attached()
        self._check_next(step)
        await _shielded(
            self._thread.submit(copy_context().run, self._accumulate, meta, weight_version)
        )

    def _accumulate(self, meta: KVBatchMeta, weight_version: int) -> None:
        rank = self._attached()
        with self._turn, self._awake(), self._idle.working():
            order = Command(
                CommandKind.ACCUMULATE, weight_version=weight_version, payload=meta.to_bytes()
            )
            self._command_group.tell(order)
            rank.accumulate(meta, weight_version=weight_version)

    async def newest_step(self) -> int:
        """The newest trained step, once no step is being trained."""
        if self._begun is not None:
            # Its failure is told to whoever asks for the step.
            await asyncio.wait([asyncio.wrap_future(self._begun[1])])
        return self._newest[0]

    def _begin(
        self,
        step: int,
        meta: KVBatchMeta,
        weight_version: int | None,
        num_steps: int | None,
        waits: Mapping[str, float],
    ) -> Future[StepResult]:
        newest, result = self._newest
        # Steps that are trained again after the run went back have other versions.
        is_repeated = weight_version is None or weight_version == self._newest_version
        if step == newest and result is not None and is_repeated:
            answered: Future[StepResult] = Future()
            answered.set_result(result)
            return answered
        self._check_next(step)
        # With its context: log lines of the thread name the step's trace.
        return self._thread.submit(
            copy_context().run, self._train, step, meta, weight_version, num_steps, waits
        )

    def _check_next(self, step: int) -> None:
        newest, _ = self._newest
        if step != newest + 1 and not self._may_miss_steps:
            raise FailedPreconditionError(
                f"step {step} does not follow the newest one, which is {newest}; train step "
                f"{newest + 1} next",
                step=step,
                newest=newest,
            )

    def _train(
        self,
        step: int,
        meta: KVBatchMeta,
        weight_version: int | None,
        num_steps: int | None,
        waits: Mapping[str, float],
    ) -> StepResult:
        rank = self._attached()
        with self._turn, self._awake():
            version = step - 1 if weight_version is None else weight_version
            idle = self._idle.step_begins(waits)
            self._command_group.tell(
                Command(CommandKind.TRAIN, step, version, meta.to_bytes(), num_steps or 0)
            )
            result = rank.train(step, meta, weight_version=version, num_steps=num_steps)
            result.metrics.update({f"idle_seconds_{why}": spent for why, spent in idle.items()})
            self._newest, self._newest_version = (step, result), version
            self._idle.step_ended()
            return result

    async def save(self, step: int, keep_steps: Collection[int] = ()) -> SavedCheckpoint:
        """Save the state of the newest step. Training waits for the copy, not for the disk.

        Args:
            step: The newest one.
            keep_steps: Steps whose checkpoints are kept besides the newest ones.

        Raises:
            FailedPreconditionError: If ``step`` is not the newest one.
            UnavailableError: If the model is not loaded yet, or a rank is gone.
        """
        rank = self._attached()
        async with self._saving:
            timer = PhaseTimer()
            with timer("snapshot"):
                snapshot = await asyncio.to_thread(self._snapshot, rank, step)
            with timer("write"):
                folder = await asyncio.to_thread(self._write, rank, snapshot, keep_steps)
            return await asyncio.to_thread(_saved, folder, timer.seconds)

    def save_progress(self) -> tuple[int, int]:
        """Bytes that are written of the checkpoint under way, and all of them; zeros before the first."""
        return self._attached().checkpointer.progress()

    def _write(self, rank: Rank, snapshot: Snapshot, keep_steps: Collection[int]) -> Path:
        with self._command_group.guard():
            return rank.checkpointer.write(snapshot, keep_steps)

    def _snapshot(self, rank: Rank, step: int) -> Snapshot:
        with self._turn, self._command_group.guard():
            # A step may have ended while this waited for its turn, so the check belongs here.
            newest, _ = self._newest
            if step != newest and not self._may_miss_steps:
                raise FailedPreconditionError(
                    f"step {step} cannot be saved, because the newest one is {newest}; save that one",
                    step=step,
                    newest=newest,
                )
            self._command_group.tell(Command(CommandKind.SAVE, step))
            return rank.snapshot(step)

    async def add_values(self, meta: KVBatchMeta) -> None:
        """Add the critic's values to samples that have none, with all ranks."""
        await asyncio.to_thread(self._add_values, meta)

    def _add_values(self, meta: KVBatchMeta) -> None:
        self._attached()
        assert self._values is not None, "only a critic is asked for values"
        with self._turn, self._command_group.guard():
            self._command_group.tell(Command(CommandKind.ADD_FIELD, payload=meta.to_bytes()))
            self._values.add(meta)

    async def sleep(self) -> None:
        """Move the training state of all ranks to host memory, once nothing is trained. Safe to repeat."""
        await asyncio.to_thread(self._move, CommandKind.SLEEP)

    async def wake(self) -> None:
        """Move the training state of all ranks back. Safe to repeat."""
        await asyncio.to_thread(self._move, CommandKind.WAKE)

    def _move(self, kind: CommandKind) -> None:
        self._attached()
        assert self._state is not None, "only the policy's trainer shares GPUs"
        with self._turn, self._command_group.guard():
            self._command_group.tell(Command(kind))
            if kind is CommandKind.SLEEP:
                self._state.put_away()
            else:
                self._state.bring_back()
            self._command_group.gather("moved")  # all have

    def weight_specs(self) -> list[TensorSpec]:
        """What will be sent, in sending order."""
        weights = self._exported()
        return weights.weight_specs()

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights, or this rank's rows of them; training waits until they are read."""
        weights = self._exported()
        with self._turn, self._awake():
            if weights.sends_rows:
                yield from weights.weight_rows()
            else:
                self._command_group.tell(Command(CommandKind.GATHER))
                yield from weights.weight_tensors()

    def score_canary(self) -> Canary:
        """Score a short text under the current weights, with all ranks."""
        weights = self._exported()
        with self._turn, self._awake():
            self._command_group.tell(Command(CommandKind.SCORE))
            return weights.score_canary()

    def stop(self) -> None:
        """End the other ranks."""
        with self._turn:
            self._command_group.tell(Command(CommandKind.STOP))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Around what all ranks do with the training state.

        Raises:
            FailedPreconditionError: If it is in host memory.
        """
        self._attached()
        if self._state is not None:
            self._state.check_here()
        with self._command_group.guard():
            yield

    def _attached(self) -> Rank:
        if self._rank is None:
            raise UnavailableError("the trainer still loads its model; ask again when it is loaded")
        return self._rank

    def _exported(self) -> WeightExport:
        self._attached()
        assert self._weights is not None, "a critic is in no weight group"
        return self._weights


async def _shielded(work: "Future[_T]") -> _T:
    """The result of work that goes on if nobody waits for it any more."""
    waiting = asyncio.wrap_future(work)
    # The caller may be gone before it fails, and asyncio logs what nobody has seen.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(waiting)


def _saved(folder: Path, seconds: Mapping[str, float]) -> SavedCheckpoint:
    return SavedCheckpoint(
        folder=folder,
        seconds=seconds,
        num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        free_bytes=shutil.disk_usage(folder).free,
    )
