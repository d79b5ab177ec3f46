"""gRPC server of the trainer."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from services.common.errors import InvalidArgumentError
from services.common.fields import group_of
from services.common.stores import size_text
from services.common.task_group import TaskGroup, unwrapped
from services.common.telemetry import tracing
from services.trainer import metrics
from services.trainer.ranks.leader import Leader
from services.trainer.steps.step import StepResult
from services.wire.batch import KVBatchMeta
from services.wire.controller import WorkerSession
from services.wire.step_command import StepCommand
from slipstream.trainer.v1 import trainer_pb2 as pb
from slipstream.trainer.v1 import trainer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_REPORT_INTERVAL_S = 1.0


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Implements the gRPC ``TrainerService`` on a :class:`Leader`.

    Args:
        observe: Exports the metrics of every answered step: called with the run, its number and its result.
        session: Returns the session of this worker, which reports steps, progress of saving, and uploads.
    """

    def __init__(
        self,
        leader: Leader,
        run_id: str,
        observe: Callable[[str, int, StepResult], None],
        session: Callable[[], WorkerSession],
    ) -> None:
        self._leader = leader
        self._run_id = run_id
        self._observe = observe
        self._session = session
        metrics.begin_run(run_id)

    async def TrainStep(
        self, request: pb.TrainStepRequest, context: _Context
    ) -> pb.TrainStepResponse:
        command = StepCommand.from_proto(request)
        # A retry of the newest step is answered without samples, which may have been released by then.
        if command.batch.num_keys == 0 and request.step != await self._leader.newest_step():
            raise InvalidArgumentError(
                f"step {request.step} has an empty batch; send at least one group",
                step=request.step,
            )
        result = await self._train(command)
        self._observe(self._run_id, request.step, result)
        self._session().report(weight_version=request.step)
        return pb.TrainStepResponse(
            step=request.step,
            metrics=result.metrics,
            skipped=result.skipped,
            left_out=result.left_out,
        )

    async def _train(self, command: StepCommand) -> StepResult:
        step = command.step
        groups = tracing.of_groups(self._run_id, map(group_of, command.batch.keys))
        begin_ns = time.time_ns()
        with tracing.span("train.step", links=groups[: tracing.MAX_LINKS], step=step) as span:
            result = await self._leader.train_step(command)
            span |= {
                name: value for name, value in result.metrics.items() if name.startswith("seconds_")
            }
        tracing.record(
            "group.train",
            groups,
            begin_ns=begin_ns,
            links=[tracing.of_step(self._run_id, step)],
            step=step,
            weight_version=command.version,
        )
        return result

    async def AccumulateStep(
        self, request: pb.AccumulateStepRequest, context: _Context
    ) -> pb.AccumulateStepResponse:
        """Accumulates gradients of some groups of the next step."""
        meta = KVBatchMeta.from_proto(request.batch)
        if meta.num_keys:
            await self._leader.accumulate(request.step, meta, weight_version=request.weight_version)
        return pb.AccumulateStepResponse()

    async def GetNewestStep(
        self, request: pb.GetNewestStepRequest, context: _Context
    ) -> pb.GetNewestStepResponse:
        return pb.GetNewestStepResponse(step=await self._leader.newest_step())

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: _Context
    ) -> pb.SaveCheckpointResponse:
        """Saves the training state; returns once the checkpoint is safe on disk."""
        with metrics.counted_checkpoint(self._run_id), unwrapped():
            async with TaskGroup() as tasks:
                reporting = tasks.create_task(self._report_saving(request.step))
                checkpoint = await self._leader.save(request.step, tuple(request.keep_steps))
                reporting.cancel()
        metrics.observe_checkpoint(self._run_id, request.step, checkpoint)
        return pb.SaveCheckpointResponse(path=checkpoint.location, size_bytes=checkpoint.num_bytes)

    async def AwaitUploads(
        self, request: pb.AwaitUploadsRequest, context: _Context
    ) -> pb.AwaitUploadsResponse:
        """Waits until the object store has all saved checkpoints, and the run's record says so."""
        await self._leader.await_uploads(request.timeout_s)
        await send_uploads(self._leader, self._session())
        return pb.AwaitUploadsResponse()

    async def Sleep(self, request: pb.SleepRequest, context: _Context) -> pb.SleepResponse:
        """Moves the training state to host memory."""
        await self._leader.sleep()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: _Context) -> pb.WakeResponse:
        """Moves the training state back to the GPU."""
        await self._leader.wake()
        return pb.WakeResponse()

    async def _report_saving(self, step: int) -> None:
        """Reports the progress of a checkpoint until cancelled."""
        try:
            while True:
                num_written, total = self._leader.save_progress()
                metrics.observe_saving(self._run_id, num_written, total)
                size = f": {size_text(num_written)} of {size_text(total)}" if total else ""
                size += ", hashing" if total and num_written == total else ""
                gauges = {"checkpoint_written_bytes": num_written, "checkpoint_bytes": total}
                self._session().report(activity=f"saving step {step}{size}", gauges=gauges)
                await asyncio.sleep(_REPORT_INTERVAL_S)
        finally:
            metrics.observe_saving(self._run_id, 0, 0)
            gauges = {"checkpoint_written_bytes": 0, "checkpoint_bytes": 0}
            self._session().report(activity="", gauges=gauges)


async def send_uploads(leader: Leader, session: WorkerSession) -> None:
    """Waits until the run's record has what happened to the uploads so far.

    Raises:
        UnavailableError: If the controller does not answer in time.
    """
    if leader.store is not None:
        leader.store.report(session)
    await session.send_events()
