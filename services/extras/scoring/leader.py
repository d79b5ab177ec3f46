"""Command loop of a scoring worker: rank 0 runs one operation at a time, and all ranks take part."""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.common.errors import FailedPreconditionError, ServiceError
from services.common.models.loading import stored_tensors
from services.trainer.engines.base import OomLimitError, score_text
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.steps.fields import FieldScoring, lacking
from services.wire.batch import KVBatchMeta


class Scorer:
    """Scores text and adopts weights. All ranks must make the same calls in the same order, one at a time."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the logprob of each token except the first, at temperature 1."""
        return score_text(self._engine, token_ids)

    def live(self) -> dict[str, Tensor]:
        """Returns the live weights by name for writing in place; this rank's rows if they are sharded."""
        return {
            name: value.detach()
            for name, value in stored_tensors(self._engine.module.model).items()
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks that tensors have the names of this model's weights.

        Raises:
            ValueError: If names are missing or unknown.
        """
        names = self.live().keys()
        if names != tensors.keys():
            raise ValueError(
                f"the weights lack {sorted(names - tensors.keys())[:3]} and have "
                f"{sorted(tensors.keys() - names)[:3]} that the model does not"
            )

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Replaces the weights. If they are sharded, each rank receives its rows, one tensor after the other.

        Ranks that share layers hold the rest of the model whole, and receive it whole. If only some ranks
        share a tensor, as with FSDP2 over tensor-parallel ranks, rank 0 is not in each of their groups: then
        every rank receives it whole and keeps its part.

        Args:
            tensors: Whole, checked tensors on rank 0; None on the other ranks.
        """
        num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        for name, live in self.live().items():
            if isinstance(live, DTensor):
                full_tensor = torch.empty(live.shape, dtype=live.dtype, device=self._engine.device)
                if tensors is not None:
                    full_tensor.copy_(tensors[name])
                if live.device_mesh.ndim == 1 and live.device_mesh.size() == num_ranks:
                    live.copy_(distribute_tensor(full_tensor, live.device_mesh, live.placements))
                else:
                    distributed.broadcast(full_tensor, src=0)
                    live.to_local().copy_(_part_like(live, full_tensor))
            else:
                # Every rank holds all of it.
                if tensors is not None:
                    live.copy_(tensors[name])
                if distributed.is_initialized():
                    distributed.broadcast(live, src=0)


def _part_like(live: DTensor, full_tensor: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor that is sharded like ``live``."""
    layout = live.shape, live.device_mesh, live.placements
    sizes, firsts = compute_local_shape_and_global_offset(*layout)
    ranges = zip(firsts, sizes, strict=True)
    return full_tensor[tuple(slice(first, first + size) for first, size in ranges)]


logger = logging.getLogger(__name__)


class ScoringLeader:
    """Rank 0 of a scoring worker. Its methods block and are thread-safe.

    Args:
        command_group: All ranks; the others run :func:`follow`.
        version: Version of the weights; -1 for weights that must not be used yet.
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
        """Scores samples that lack the field and stores it; returns the number of these samples.

        Args:
            version: Expected weight version; None accepts the current one.

        Raises:
            NotFoundError: If samples were released meanwhile.
            FailedPreconditionError: If other weights are in service.
            UnavailableError: If a rank failed.
        """
        meta = lacking(meta, self._fields.field)
        if meta.num_keys == 0:
            return 0
        with self._turn, self._command_group.guard():
            if version is not None and version != self.version:
                raise FailedPreconditionError(
                    f"the request needs weight version {version}, but this worker has {self.version}; "
                    f"publish version {version} first",
                    asked=version,
                    served=self.version,
                )
            self._command_group.broadcast(
                Command(CommandKind.ADD_FIELD, weight_version=self.version, payload=meta.to_bytes())
            )
            self._fields.add(meta, version=self.version)
        return meta.num_keys

    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the logprob of each token except the first, at temperature 1."""
        with self._turn, self._command_group.guard():
            self._command_group.broadcast(
                Command(CommandKind.SCORE, payload=json.dumps(list(token_ids)).encode())
            )
            return self._scorer.score_text(token_ids)

    def adopt(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Replaces the weights; returns the seconds in which nothing could be scored.

        Raises:
            ValueError: If the weights are not those of this model.
            UnavailableError: If a rank failed.
        """
        self._scorer.check(tensors)
        if not self._is_open:
            self._turn.acquire()
        try:
            start = time.perf_counter()
            with self._command_group.guard():
                self._command_group.broadcast(Command(CommandKind.ADOPT))
                self._scorer.adopt(tensors)
            self.version = version
            return time.perf_counter() - start
        finally:
            self._is_open = False
            self._turn.release()

    def open(self) -> dict[str, Tensor]:
        """Blocks scoring until :meth:`adopt` or :meth:`close`; returns the weights for in-place writes."""
        if not self._is_open:
            self._turn.acquire()
        self._is_open = True
        return self._scorer.live()

    def close(self) -> None:
        """Resumes scoring with the live weights, if nothing was written into them."""
        if self._is_open:
            self._is_open = False
            self._turn.release()

    def refuse(self) -> None:
        """Marks the weights as wrong, so that nothing is scored until others are adopted."""
        if self._is_open:  # the lock is held since open()
            self.version = -1
            return
        with self._turn:
            self.version = -1

    def stop(self) -> None:
        self.close()
        with self._turn:
            self._command_group.broadcast(Command(CommandKind.STOP))


def follow(command_group: CommandGroup, scorer: Scorer, fields: FieldScoring) -> None:
    """Executes the commands of rank 0 until it sends STOP. Blocks; runs in a thread.

    Raises:
        RankFailedError: If this rank or another one fails; the other ranks have been notified by then.
    """
    with command_group.guard(ends=True):
        while (command := command_group.receive()).kind is not CommandKind.STOP:
            try:
                if command.kind is CommandKind.ADD_FIELD:
                    fields.add(
                        KVBatchMeta.from_bytes(command.payload), version=command.weight_version
                    )
                elif command.kind is CommandKind.SCORE:
                    scorer.score_text(json.loads(command.payload))
                elif command.kind is CommandKind.ADOPT:
                    scorer.adopt(None)
            except (ServiceError, ValueError) as error:
                if isinstance(error, OomLimitError) or command_group.has_failed:
                    raise  # other ranks wait for this one
                # Rank 0 got the same error and reports it; the next command may succeed.
                facts = {"command": command.kind.name, "error": str(error)}
                logger.warning("command failed", extra=facts)
