"""Ranks above 0: execute the commands of rank 0 and send their own rows of the weights."""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from services.common.errors import DeadlineExceededError, FailedPreconditionError, ServiceError
from services.trainer.engines.base import OomLimitError
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.ranks.rank import Rank, canary_of
from services.trainer.steps.fields import FieldScoring
from services.weightsync.canary import Canary
from services.weightsync.weight_plan import TensorSpec
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand

logger = logging.getLogger(__name__)

GATHER_TIMEOUT_S = 120.0
"""Max seconds in which rank 0 begins to gather, and all ranks have their rows."""


class Follower:
    """Executes the commands of rank 0."""

    def __init__(
        self, command_group: CommandGroup, rank: Rank, *, values: FieldScoring | None = None
    ) -> None:
        self._command_group = command_group
        self._rank = rank
        self._engine = rank.runner.engine
        self._values = values
        # A transfer copies the rows that training changes, and both run in threads.
        self._turn = threading.Lock()
        self._gathered = GatheredRows()

    def follow(self) -> None:
        """Executes commands until rank 0 sends STOP. Blocks; runs in a thread.

        Raises:
            RankFailedError: If this rank or another one fails; the other ranks have been notified by then.
        """
        with (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint") as writer,
            self._command_group.guard(ends=True),
        ):
            writing: Future[Path] | None = None
            while (command := self._command_group.receive()).kind is not CommandKind.STOP:
                with self._turn:
                    if command.kind is CommandKind.SAVE:
                        if writing is not None:
                            _await_written(writing)  # the new snapshot reuses its buffers
                        snapshot = self._rank.snapshot(command.step)
                        writing = writer.submit(self._rank.checkpointer.write, snapshot)
                    else:
                        self._try_execute(command)

    def weight_specs(self) -> list[TensorSpec]:
        """Returns the specifications of all tensors of the model, in sending order."""
        return list(self._engine.weights.specs)

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the rows of this rank; training waits until all are read.

        Raises:
            DeadlineExceededError: If ranks gather their rows together, and rank 0 does not begin in time.
        """
        if self._engine.weights.gathers_rows:
            rows = self._gathered.wait()
            yield from rows
            # A sender that failed before it had all of them asks again, but rank 0 may not gather again.
            self._gathered.clear(rows)
            return
        with self._turn:
            self._rank.check_awake()
            yield from self._engine.export_weights(rows=True)

    def score_canary(self) -> Canary:
        """Raises an error: all ranks score the canary together, on a command of rank 0.

        Raises:
            FailedPreconditionError: Always.
        """
        raise FailedPreconditionError("request the canary from rank 0: all ranks score it together")

    def _try_execute(self, command: Command) -> None:
        try:
            self._execute(command)
        except (ServiceError, ValueError) as error:
            if isinstance(error, OomLimitError) or self._command_group.has_failed:
                raise  # other ranks wait for this one
            # Rank 0 got the same error and reports it; the next command may succeed.
            logger.warning(
                "command failed", extra={"command": command.kind.name, "error": str(error)}
            )

    def _execute(self, command: Command) -> None:
        if command.kind is CommandKind.TRAIN:
            self._gathered.clear()
            self._rank.train(StepCommand.from_bytes(command.payload))
        elif command.kind is CommandKind.ACCUMULATE:
            meta = KVBatchMeta.from_bytes(command.payload)
            self._rank.accumulate(meta, weight_version=command.weight_version)
        elif command.kind is CommandKind.GATHER and self._engine.weights.gathers_rows:
            self._gathered.set(self._engine.export_weights(rows=True))
        elif command.kind is CommandKind.GATHER:
            for _ in self._engine.export_weights():
                pass
        elif command.kind is CommandKind.SLEEP:
            self._rank.sleep()
            self._command_group.gather("moved")
        elif command.kind is CommandKind.WAKE:
            self._rank.wake()
            self._command_group.gather("moved")
        elif command.kind is CommandKind.SCORE:
            canary_of(self._engine)
        elif command.kind is CommandKind.ADD_FIELD and self._values is not None:
            self._values.add(KVBatchMeta.from_bytes(command.payload))


class GatheredRows:
    """Rows that all ranks gathered together, until they are sent or training changes the weights.

    Rank 0 and the sender of this rank's weights are called at about the same time, in any order.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[str, Tensor]] | None = None
        self._change = threading.Condition()

    def set(self, rows: Iterable[tuple[str, Tensor]]) -> None:
        """Gathers and keeps rows."""
        gathered = [(name, value.clone()) for name, value in rows]
        with self._change:
            self._rows = gathered
            self._change.notify_all()

    def clear(self, rows: Sequence[tuple[str, Tensor]] | None = None) -> None:
        """Drops the rows; given some, only if no newer ones replaced them."""
        with self._change:
            if rows is None or rows is self._rows:
                self._rows = None

    def wait(self, timeout_s: float = GATHER_TIMEOUT_S) -> Sequence[tuple[str, Tensor]]:
        """Returns the rows of the current weights.

        Raises:
            DeadlineExceededError: If they are not gathered in time.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._rows is not None, timeout_s):
                raise DeadlineExceededError(
                    f"rank 0 of the trainer did not gather the weights of its ranks within {timeout_s:g} s; "
                    "it may be busy or lost: see its log"
                )
            assert self._rows is not None
            return self._rows


def _await_written(writing: Future[Path]) -> None:
    try:
        writing.result()
    except ServiceError as error:
        # Rank 0 reports the failure to its caller.
        logger.warning("checkpoint not written", extra={"error": str(error)})
