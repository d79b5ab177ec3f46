"""Role logp: scores batches on request of the controller, under the weights that the trainer published."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from torch import Tensor

from services.common.errors import InvalidArgumentError, UnavailableError
from services.trainer import metrics
from services.trainer.scoring.leader import ScoringLeader
from services.weightsync.endpoints import Place
from services.weightsync.modes.placing import live_placer
from services.weightsync.plan import WeightPlan
from services.wire.batch import KVBatchMeta
from slipstream.trainer.v1 import scoring_pb2 as pb
from slipstream.trainer.v1 import scoring_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ScoringServicer(scoring_pb2_grpc.ScoringServiceServicer):
    """Implements the gRPC ``ScoringService`` and receives published weights.

    Raises ``UnavailableError`` until :meth:`attach`.

    Args:
        run_id: Label of the metrics.
        on_refused: Called with the reason if this worker stops scoring until it receives other weights.
    """

    def __init__(self, run_id: str, on_refused: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._on_refused = on_refused
        self._leader: ScoringLeader | None = None
        self._live: Mapping[str, Tensor] = {}

    def attach(self, leader: ScoringLeader) -> None:
        """Starts to answer calls."""
        self._leader = leader

    async def ScoreBatch(
        self, request: pb.ScoreBatchRequest, context: _Context
    ) -> pb.ScoreBatchResponse:
        """Adds proximal logprobs to samples."""
        leader = self._attached()
        meta = KVBatchMeta.from_proto(request.batch)
        start = time.perf_counter()
        await asyncio.to_thread(leader.add, meta, version=request.weight_version)
        spent_s = time.perf_counter() - start
        metrics.STEP_SECONDS.labels(self._run_id, "old_logprob").observe(spent_s)
        return pb.ScoreBatchResponse(duration_s=spent_s)

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Adopts a version; returns the seconds in which nothing was scored."""
        leader = self._attached()
        try:
            return await asyncio.to_thread(leader.adopt, version, tensors)
        except ValueError as error:
            raise InvalidArgumentError(str(error), version=version) from error

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the logprob of each token except the first, under the live weights at temperature 1."""
        leader = self._attached()
        return await asyncio.to_thread(leader.score_text, token_ids)

    async def refuse_weights(self, reason: str) -> None:
        """Stops scoring until other weights are adopted, because the live ones differ from the trainer's."""
        leader = self._attached()
        await asyncio.to_thread(leader.refuse)
        self._on_refused(reason)

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Blocks scoring, and returns a function that writes received tensors into the live weights."""
        leader = self._attached()
        self._live = await asyncio.to_thread(leader.open)
        return live_placer(plan, self._live)

    async def adopt_placed(self, version: int) -> float:
        """Adopts the weights that were written in place."""
        return await self.adopt_weights(version, self._live)

    async def close_weights(self) -> None:
        """Resumes scoring with the live weights, if nothing was written into them."""
        leader = self._attached()
        leader.close()

    def _attached(self) -> ScoringLeader:
        if self._leader is None:
            raise UnavailableError("this worker still loads its model; ask again when it is loaded")
        return self._leader
