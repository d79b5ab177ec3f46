"""Worker of the role critic: scores values and trains until the controller stops it."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc

from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.trainer import metrics
from services.trainer.ranks.build import build_critic
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.server import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.steps.fields import lacking
from services.trainer.steps.step import StepResult
from services.wire.batch import KVBatchMeta
from services.wire.controller import WorkerSession
from slipstream.trainer.v1 import scoring_pb2 as pb
from slipstream.trainer.v1 import scoring_pb2_grpc, trainer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ValuesServicer(scoring_pb2_grpc.ScoringServiceServicer):
    """Implements the gRPC ``ScoringService``: adds the critic's values to batches.

    Args:
        leader: Rank 0 of the critic.
    """

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def ScoreBatch(
        self, request: pb.ScoreBatchRequest, context: _Context
    ) -> pb.ScoreBatchResponse:
        """Adds values to those samples that have none."""
        start = time.perf_counter()
        meta = lacking(KVBatchMeta.from_proto(request.batch), "values")
        if meta.num_keys > 0:
            await self._leader.add_values(meta)
        return pb.ScoreBatchResponse(duration_s=time.perf_counter() - start)


async def serve_critic(settings: TrainerSettings) -> None:
    """Serves one run as rank 0 of its critic."""
    leader, command_group = Leader(may_miss_steps=True), CommandGroup(settings.world_size)

    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())

        def on_saving(activity: str, gauges: Mapping[str, float]) -> None:
            session.report(activity=activity, gauges=gauges)

        def register(server: grpc.aio.Server) -> None:
            on_step = _reporter(settings.run_id, lambda step: session.report(weight_version=step))
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                TrainerServicer(leader, settings.run_id, on_step, on_saving), server
            )
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(ValuesServicer(leader), server)

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="critic", port=port))
        built = await load(stack, session, command_group, settings, build_critic)
        leader.attach(built.rank, command_group, values=built.values, step=built.step)
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="ready", activity="", weight_version=built.step)
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        await until_stopped(session, command_group)


async def follow_critic(start: FollowerStart) -> None:
    """Executes the commands of rank 0 of the critic."""
    built = await start.build(build_critic)
    follower = Follower(start.command_group, built.rank, values=built.values)
    await asyncio.to_thread(follower.follow)


def _reporter(run_id: str, report: Callable[[int], None]) -> Callable[[int, StepResult], None]:
    def on_step(step: int, result: StepResult) -> None:
        spent = result.metrics.get("seconds_critic", 0.0)
        metrics.STEP_SECONDS.labels(run_id, "critic").observe(spent)
        nonfinite = result.metrics.get("nonfinite_critic", 0.0)
        metrics.NONFINITE.labels(run_id, "critic").inc(nonfinite)
        report(step)

    return on_step
