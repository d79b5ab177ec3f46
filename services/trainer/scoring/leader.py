"""The ranks of a worker that scores: rank 0 does one thing at a time, and the others do the same."""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from services.common.batch import KVBatchMeta
from services.common.errors import FailedPreconditionError, ServiceError
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.steps.fields import FieldScoring, lacking
from services.trainer.steps.oom import OomLimitError
from services.trainer.steps.scorer import Scorer

logger = logging.getLogger(__name__)


class ScoringLeader:
    """Rank 0 of a worker that scores. Its methods block and may be called from several threads.

    Args:
        scorer: This rank's part of the policy.
        fields: This rank's part in scoring samples.
        command_group: The other ranks, who follow (:func:`follow`).
        version: Number of the weights; -1 for weights that may not be used yet.
    """

    def __init__(
        self,
        scorer: Scorer,
        fields: FieldScoring,
        *,
        command_group: CommandGroup | None = None,
        version: int,
    ) -> None:
        self._scorer = scorer
        self._fields = fields
        self._command_group = command_group or CommandGroup(1)
        self._turn = threading.Lock()
        self._is_open = False
        self.version = version

    def add(self, meta: KVBatchMeta, *, version: int | None = None) -> int:
        """Score those samples that lack the field, and add it; returns how many there were.

        Args:
            meta: The samples.
            version: Weights that are meant; None takes those that are there.

        Raises:
            NotFoundError: If samples were released meanwhile.
            FailedPreconditionError: If other weights are in service.
            UnavailableError: If a rank is gone.
        """
        meta = lacking(meta, self._fields.field)
        if meta.num_keys == 0:
            return 0
        with self._turn, self._command_group.guard():
            if version is not None and version != self.version:
                raise FailedPreconditionError(
                    f"weights {version} are asked for, but this worker has {self.version}; publish "
                    "them first",
                    asked=version,
                    served=self.version,
                )
            self._command_group.tell(
                Command(CommandKind.ADD_FIELD, weight_version=self.version, payload=meta.to_bytes())
            )
            self._fields.add(meta, version=self.version)
        return meta.num_keys

    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token but the first, at temperature 1."""
        with self._turn, self._command_group.guard():
            self._command_group.tell(
                Command(CommandKind.SCORE, payload=json.dumps(list(token_ids)).encode())
            )
            return self._scorer.score_text(token_ids)

    def adopt(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Replace the weights; returns the seconds in which nothing could be scored.

        Raises:
            ValueError: If they are not those of this model.
            UnavailableError: If a rank is gone.
        """
        self._scorer.check(tensors)
        if not self._is_open:
            self._turn.acquire()
        try:
            start = time.perf_counter()
            with self._command_group.guard():
                self._command_group.tell(Command(CommandKind.ADOPT))
                self._scorer.adopt(tensors)
            self.version = version
            return time.perf_counter() - start
        finally:
            self._is_open = False
            self._turn.release()

    def open(self) -> dict[str, Tensor]:
        """Score nothing, and give the live weights to be written in place, until they are adopted."""
        if not self._is_open:
            self._turn.acquire()
        self._is_open = True
        return self._scorer.live()

    def close(self) -> None:
        """Go on with the live weights: nothing was written."""
        if self._is_open:
            self._is_open = False
            self._turn.release()

    def refuse(self) -> None:
        """The weights are wrong: score nothing until others are adopted."""
        if self._is_open:  # it has the turn
            self.version = -1
            return
        with self._turn:
            self.version = -1

    def stop(self) -> None:
        """End the other ranks."""
        self.close()
        with self._turn:
            self._command_group.tell(Command(CommandKind.STOP))


def follow(command_group: CommandGroup, scorer: Scorer, fields: FieldScoring) -> None:
    """Take part in whatever rank 0 orders, until the end. Blocks; runs in a thread.

    Raises:
        RankFailedError: If this rank or another one fails; the other ranks know it by then.
    """
    with command_group.guard(ends=True):
        while (order := command_group.receive()).kind is not CommandKind.STOP:
            try:
                if order.kind is CommandKind.ADD_FIELD:
                    fields.add(KVBatchMeta.from_bytes(order.payload), version=order.weight_version)
                elif order.kind is CommandKind.SCORE:
                    scorer.score_text(json.loads(order.payload))
                elif order.kind is CommandKind.ADOPT:
                    scorer.adopt(None)
            except (ServiceError, ValueError) as error:
                if isinstance(error, OomLimitError) or command_group.has_failed:
                    raise  # others wait for this rank
                # Rank 0 met the same and reports it; the next order may be a good one.
                told = {"order": order.kind.name, "error": str(error)}
                logger.warning("order failed", extra=told)
