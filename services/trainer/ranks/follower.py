"""Ranks above 0: execute the commands of rank 0 and send their own rows of the weights."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from services.common.errors import FailedPreconditionError, ServiceError
from services.trainer.engines.fsdp.host_copy import OffloadedState
from services.trainer.engines.fsdp.oom import OomLimitError
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.ranks.rank import Rank
from services.trainer.steps.fields import FieldScoring
from services.weightsync.canary import Canary
from services.weightsync.plan import TensorSpec
from services.wire.batch import KVBatchMeta

logger = logging.getLogger(__name__)


class Follower:
    """Executes the commands of rank 0.

    Args:
        command_group: Receives the commands.
        rank: This process's part in training.
        weights: Exports the policy's weights; None for a critic, whose weights are not published.
        values: Scores batches; only for a critic.
        state: The policy's training state, which can move to host memory.
    """

    def __init__(
        self,
        command_group: CommandGroup,
        rank: Rank,
        *,
        weights: WeightExport | None = None,
        values: FieldScoring | None = None,
        state: OffloadedState | None = None,
    ) -> None:
        self._command_group = command_group
        self._rank = rank
        self._weights = weights
        self._values = values
        self._state = state
        # A transfer copies the rows that training changes, and both run in threads.
        self._turn = threading.Lock()

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
            while (order := self._command_group.receive()).kind is not CommandKind.STOP:
                with self._turn:
                    if order.kind is CommandKind.SAVE:
                        if writing is not None:
                            _await_written(writing)  # the new snapshot reuses its buffers
                        snapshot = self._rank.snapshot(order.step)
                        writing = writer.submit(self._rank.checkpointer.write, snapshot)
                    else:
                        self._take_part(order)

    def weight_specs(self) -> list[TensorSpec]:
        """Returns the specifications of all tensors of the model, in sending order."""
        return self._exported().weight_specs()

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the rows of this rank; training waits until all are read."""
        with self._turn:
            if self._state is not None:
                self._state.check_here()
            yield from self._exported().weight_rows()

    def score_canary(self) -> Canary:
        """Raises, because only rank 0 answers this; this rank scores when rank 0 sends the command.

        Raises:
            FailedPreconditionError: Always.
        """
        raise FailedPreconditionError("ask rank 0 for the canary: all ranks score it together")

    def _take_part(self, order: Command) -> None:
        try:
            self._obey(order)
        except (ServiceError, ValueError) as error:
            if isinstance(error, OomLimitError) or self._command_group.has_failed:
                raise  # other ranks wait for this one
            # Rank 0 got the same error and reports it; the next command may succeed.
            logger.warning("order failed", extra={"order": order.kind.name, "error": str(error)})

    def _obey(self, order: Command) -> None:
        if order.kind is CommandKind.TRAIN:
            meta = KVBatchMeta.from_bytes(order.payload)
            self._rank.train(
                order.step,
                meta,
                weight_version=order.weight_version,
                num_steps=order.num_steps or None,
            )
        elif order.kind is CommandKind.ACCUMULATE:
            meta = KVBatchMeta.from_bytes(order.payload)
            self._rank.accumulate(meta, weight_version=order.weight_version)
        elif order.kind is CommandKind.GATHER:
            for _ in self._exported().weight_tensors():
                pass
        elif order.kind is CommandKind.SLEEP and self._state is not None:
            self._state.put_away()
            self._command_group.gather("moved")
        elif order.kind is CommandKind.WAKE and self._state is not None:
            self._state.bring_back()
            self._command_group.gather("moved")
        elif order.kind is CommandKind.SCORE:
            self._exported().score_canary()
        elif order.kind is CommandKind.ADD_FIELD and self._values is not None:
            self._values.add(KVBatchMeta.from_bytes(order.payload))

    def _exported(self) -> WeightExport:
        assert self._weights is not None, "a critic is in no weight group"
        return self._weights


def _await_written(writing: Future[Path]) -> None:
    try:
        writing.result()
    except ServiceError as error:
        # Rank 0 reports the failure to its caller.
        logger.warning("checkpoint not written", extra={"error": str(error)})
