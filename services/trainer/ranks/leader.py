"""Leader of a trainer's ranks: trains each step once and in order, exports weights between steps."""

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

from services.common.errors import FailedPreconditionError, UnavailableError
from services.common.stores import StoredCheckpoints
from services.common.task_group import uninterrupted
from services.common.telemetry.metrics import IdleClock, PhaseTimer
from services.trainer.checkpoint.checkpointer import Snapshot
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.ranks.rank import Rank, canary_of
from services.trainer.steps.fields import FieldScoring
from services.trainer.steps.step import StepResult
from services.weightsync.canary import Canary
from services.weightsync.weight_plan import TensorSpec
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is safe on disk."""

    folder: Path
    location: str
    """The folder, or the URL to which it is uploaded."""
    seconds: Mapping[str, float]
    """Seconds by phase; only ``snapshot`` blocks training, ``write`` does not."""
    num_bytes: int
    """Size of the checkpoint in bytes."""
    free_bytes: int
    """Free bytes that remain on the checkpoint's volume."""


class Leader:
    """Serves steps and weights from rank 0; raises ``UnavailableError`` until :meth:`attach`.

    Args:
        may_miss_steps: True if a step need not follow the newest one: a critic that was lost resumes without
            the steps since its checkpoint.
    """

    def __init__(self, *, may_miss_steps: bool = False) -> None:
        self._may_miss_steps = may_miss_steps
        self._rank: Rank | None = None
        self._values: FieldScoring | None = None
        self._command_group = CommandGroup(1)
        self._newest: tuple[int, StepResult | None] = (0, None)
        self._newest_version = 0
        self._begun: tuple[int, Future[StepResult]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        # A transfer copies the weights that training changes, and both run in threads.
        self._turn = threading.Lock()
        self._steps = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._idle = IdleClock()

    def attach(
        self,
        rank: Rank,
        command_group: CommandGroup,
        *,
        values: FieldScoring | None = None,
        step: int = 0,
    ) -> None:
        """Starts to answer calls, with the other ranks ready to execute commands."""
        self._newest = (step, None)
        self._command_group = command_group
        self._values = values
        self._rank = rank

    async def train_step(self, command: StepCommand) -> StepResult:
        """Trains a step, or returns the stored result if it is the newest one.

        A running step continues if the caller disconnects: a restarted controller requests the same step
        and receives its result.

        Raises:
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the model is not loaded yet, or a rank failed.
        """
        async with self._steps:
            step = command.step
            if self._begun is None or self._begun[0] != step or self._begun[1].done():
                self._begun = step, self._begin(command)
            return await _shielded(self._begun[1])

    async def accumulate(self, step: int, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Accumulates gradients of some groups of the next step while others are generated. Safe to retry.

        Raises:
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the model is not loaded yet, or a rank failed.
        """
        self._attached()
        self._check_next(step)
        await _shielded(
            self._thread.submit(copy_context().run, self._accumulate, meta, weight_version)
        )

    def _accumulate(self, meta: KVBatchMeta, weight_version: int) -> None:
        rank = self._attached()
        with self._turn, self._awake(), self._idle.working():
            command = Command(
                CommandKind.ACCUMULATE, weight_version=weight_version, payload=meta.to_bytes()
            )
            self._command_group.broadcast(command)
            rank.accumulate(meta, weight_version=weight_version)

    async def newest_step(self) -> int:
        """Returns the newest trained step; waits for a step that is being trained."""
        if self._begun is not None:
            # Its failure is raised to the caller that requests the step.
            await asyncio.wait([asyncio.wrap_future(self._begun[1])])
        return self._newest[0]

    def _begin(self, command: StepCommand) -> Future[StepResult]:
        newest, result = self._newest
        # After the run went back to a checkpoint, retrained steps have the same number but other versions.
        is_repeated = command.weight_version in (None, self._newest_version)
        if command.step == newest and result is not None and is_repeated:
            future: Future[StepResult] = Future()
            future.set_result(result)
            return future
        self._check_next(command.step)
        # The copied context lets log lines of the thread carry the step's trace.
        return self._thread.submit(copy_context().run, self._train, command)

    def _check_next(self, step: int) -> None:
        newest, _ = self._newest
        if step != newest + 1 and not self._may_miss_steps:
            raise FailedPreconditionError(
                f"step {step} does not follow the newest step {newest}; train step "
                f"{newest + 1} next",
                step=step,
                newest=newest,
            )

    def _train(self, command: StepCommand) -> StepResult:
        rank = self._attached()
        with self._turn, self._awake():
            idle = self._idle.step_begins(command.waits)
            self._command_group.broadcast(Command(CommandKind.TRAIN, payload=command.to_bytes()))
            result = rank.train(command)
            result.metrics.update({f"idle_seconds_{why}": idle_s for why, idle_s in idle.items()})
            self._newest, self._newest_version = (command.step, result), command.version
            self._idle.step_ended()
            return result

    async def save(self, step: int, keep_steps: Collection[int] = ()) -> SavedCheckpoint:
        """Saves the state of the newest step. Training waits for the copy, not for the disk.

        A save that has begun ends even if the caller disconnects.

        Args:
            keep_steps: Steps whose checkpoints are kept besides the newest ones.

        Raises:
            FailedPreconditionError: If ``step`` is not the newest one.
            UnavailableError: If the model is not loaded yet, or a rank failed.
        """
        # The next snapshot reuses the buffers from which this one is written, and all ranks write together.
        return await uninterrupted(self._save(self._attached(), step, keep_steps))

    async def _save(self, rank: Rank, step: int, keep_steps: Collection[int]) -> SavedCheckpoint:
        async with self._saving:
            timer = PhaseTimer()
            with timer("snapshot"):
                snapshot = await asyncio.to_thread(self._snapshot, rank, step)
            with timer("write"):
                folder = await asyncio.to_thread(self._write, rank, snapshot, keep_steps)
            location = rank.checkpointer.location(folder)
            return await asyncio.to_thread(_saved, folder, location, timer.seconds)

    async def await_uploads(self, timeout_s: float) -> None:
        """Waits until the object store has all saved checkpoints; returns at once without a store.

        Raises:
            DeadlineExceededError: If it has not in time; the message has the first cause.
            FailedPreconditionError: If one cannot be uploaded.
        """
        store = self._attached().checkpointer.store
        if store is not None:
            await asyncio.to_thread(store.wait, timeout_s)

    @property
    def store(self) -> StoredCheckpoints | None:
        """Object store of the checkpoints; None without one, and before the model is loaded."""
        return None if self._rank is None else self._rank.checkpointer.store

    def save_progress(self) -> tuple[int, int]:
        """Returns written and total bytes of the checkpoint that is being written; zeros if there is none."""
        return self._attached().checkpointer.progress()

    def _write(self, rank: Rank, snapshot: Snapshot, keep_steps: Collection[int]) -> Path:
        with self._command_group.guard():
            return rank.checkpointer.write(snapshot, keep_steps)

    def _snapshot(self, rank: Rank, step: int) -> Snapshot:
        with self._turn, self._command_group.guard():
            # A step may have ended while this thread waited for the lock, so the check belongs here.
            newest, _ = self._newest
            if step != newest and not self._may_miss_steps:
                raise FailedPreconditionError(
                    f"step {step} cannot be saved, because the newest step is {newest}; save step {newest}",
                    step=step,
                    newest=newest,
                )
            self._command_group.broadcast(Command(CommandKind.SAVE, step))
            return rank.snapshot(step)

    async def add_values(self, meta: KVBatchMeta) -> None:
        """Adds the critic's values to samples that have none, with all ranks."""
        await asyncio.to_thread(self._add_values, meta)

    def _add_values(self, meta: KVBatchMeta) -> None:
        self._attached()
        assert self._values is not None, "only a critic computes values"
        with self._turn, self._command_group.guard():
            self._command_group.broadcast(Command(CommandKind.ADD_FIELD, payload=meta.to_bytes()))
            self._values.add(meta)

    async def sleep(self) -> None:
        """Moves the training state of all ranks to host memory, after the running step. Safe to retry."""
        await asyncio.to_thread(self._move, CommandKind.SLEEP)

    async def wake(self) -> None:
        """Moves the training state of all ranks back to their GPUs. Safe to retry."""
        await asyncio.to_thread(self._move, CommandKind.WAKE)

    def _move(self, kind: CommandKind) -> None:
        rank = self._attached()
        with self._turn, self._command_group.guard():
            self._command_group.broadcast(Command(kind))
            if kind is CommandKind.SLEEP:
                rank.sleep()
            else:
                rank.wake()
            self._command_group.gather("moved")  # returns once all ranks have moved

    def weight_specs(self) -> list[TensorSpec]:
        """Returns the specifications of all exported tensors, in sending order."""
        return list(self._attached().runner.engine.weights.specs)

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the current weights, or this rank's rows of them; training waits until all are read."""
        engine = self._attached().runner.engine
        with self._turn, self._awake():
            layout = engine.weights
            if not layout.sends_rows or layout.gathers_rows:
                self._command_group.broadcast(Command(CommandKind.GATHER))
            yield from engine.export_weights(rows=layout.sends_rows)

    def score_canary(self) -> Canary:
        """Scores a short text under the current weights, with all ranks."""
        engine = self._attached().runner.engine
        with self._turn, self._awake():
            self._command_group.broadcast(Command(CommandKind.SCORE))
            return canary_of(engine)

    def stop(self) -> None:
        with self._turn:
            self._command_group.broadcast(Command(CommandKind.STOP))
        if self._rank is not None and self._rank.checkpointer.store is not None:
            self._rank.checkpointer.store.close()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Guards work of all ranks on the training state.

        Raises:
            FailedPreconditionError: If the state is in host memory.
        """
        self._attached().check_awake()
        with self._command_group.guard():
            yield

    def _attached(self) -> Rank:
        if self._rank is None:
            raise UnavailableError("the trainer is still loading its model; retry later")
        return self._rank


async def _shielded(work: "Future[_T]") -> _T:
    """Awaits work that continues if its caller is cancelled."""
    waiting = asyncio.wrap_future(work)
    # The caller may be gone when the work fails; asyncio would log the exception as never retrieved.
    waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(waiting)


def _saved(folder: Path, location: str, seconds: Mapping[str, float]) -> SavedCheckpoint:
    return SavedCheckpoint(
        folder=folder,
        location=location,
        seconds=seconds,
        num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        free_bytes=shutil.disk_usage(folder).free,
    )
