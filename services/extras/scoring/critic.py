"""Worker of the role critic, on its own GPUs: trains the critic and adds its values to batches."""

import asyncio
import time
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
from services.trainer.ranks.start import FollowerStart, load
from services.trainer.server import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.steps.fields import lacking
from services.trainer.steps.step import StepResult
from services.trainer.worker import train_until_stopped
from services.wire.batch import KVBatchMeta
from services.wire.controller import WorkerSession
from slipstream.trainer.v1 import scoring_pb2 as pb
from slipstream.trainer.v1 import scoring_pb2_grpc, trainer_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ValuesServicer(scoring_pb2_grpc.ScoringServiceServicer):
    """Implements the gRPC ``ScoringService``: adds the critic's values to batches."""

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


def _observe_step(run: str, step: int, result: StepResult) -> None:
    """Exports the metrics of a step."""
    metrics.STEP_SECONDS.labels(run, "critic").observe(result.metrics.get("seconds_critic", 0.0))
    metrics.NONFINITE.labels(run, "critic").inc(result.metrics.get("nonfinite_critic", 0.0))
    metrics.observe_loss_scale(run, result.metrics)


async def serve_critic(settings: TrainerSettings) -> None:
    leader = Leader(may_miss_steps=True)
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)

    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())

        def register(server: grpc.aio.Server) -> None:
            servicer = TrainerServicer(leader, settings.run_id, _observe_step, lambda: session)
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(ValuesServicer(leader), server)

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="critic", port=port))
        critic = await load(stack, session, command_group, settings, build_critic)
        leader.attach(critic.rank, command_group, values=critic.values, step=critic.step)
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        await train_until_stopped(stack, leader, session, command_group, step=critic.step)


async def follow_critic(start: FollowerStart) -> None:
    """Executes the commands of rank 0 of the critic."""
    critic = await start.build(build_critic)
    follower = Follower(start.command_group, critic.rank, values=critic.values)
    await asyncio.to_thread(follower.follow)
