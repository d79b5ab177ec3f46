"""gRPC face of the trainer."""

from collections.abc import Callable
from typing import Any

import grpc

from services.common.batch import KVBatchMeta
from services.common.errors import InvalidArgumentError
from services.trainer import metrics
from services.trainer.ranks.leader import Leader
from slipstream.trainer.v1 import trainer_pb2 as pb
from slipstream.trainer.v1 import trainer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Translates requests for a :class:`Leader`.

    Args:
        leader: Trains.
        run_id: Labels the metrics.
        on_step: Hears of every answered step.
    """

    def __init__(self, leader: Leader, run_id: str, on_step: Callable[[int], None]) -> None:
        self._leader = leader
        self._run_id = run_id
        self._on_step = on_step

    async def TrainStep(  # noqa: N802
        self, request: pb.TrainStepRequest, context: _Context
    ) -> pb.TrainStepResponse:
        """Train one batch."""
        try:
            meta = KVBatchMeta.from_proto(request.batch)
        except ValueError as error:
            raise InvalidArgumentError(f"the batch of step {request.step}: {error}") from error
        # A repetition of the newest step is answered without its samples: they may be gone by then.
        if meta.num_keys == 0 and request.step != await self._leader.newest_step():
            raise InvalidArgumentError(
                f"step {request.step} has an empty batch; send at least one group",
                step=request.step,
            )
        result = await self._leader.train_step(
            request.step, meta, weight_version=request.weight_version
        )
        metrics.observe_step(self._run_id, request.step, result.metrics, skipped=result.skipped)
        self._on_step(request.step)
        return pb.TrainStepResponse(
            step=request.step, metrics=result.metrics, skipped=result.skipped
        )

    async def GetNewestStep(  # noqa: N802
        self, request: pb.GetNewestStepRequest, context: _Context
    ) -> pb.GetNewestStepResponse:
        """How far training is."""
        return pb.GetNewestStepResponse(step=await self._leader.newest_step())

    async def SaveCheckpoint(  # noqa: N802
        self, request: pb.SaveCheckpointRequest, context: _Context
    ) -> pb.SaveCheckpointResponse:
        """Save the training state; answers when it is safe on disk."""
        with metrics.counted_checkpoint(self._run_id):
            saved = await self._leader.save(request.step)
        metrics.observe_checkpoint(self._run_id, request.step, saved.seconds)
        return pb.SaveCheckpointResponse(path=str(saved.folder))
