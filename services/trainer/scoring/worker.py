"""Rank 0 of a worker of the role logp or ref_logp: loads, registers and scores until the controller stops it.

ref_logp  holds the frozen base model and scores groups as they finish (scoring.reference)
logp      holds the published weights and scores the batches that it receives (scoring.server)
"""

import asyncio
from contextlib import AsyncExitStack

import grpc
import torch

from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.common.task_group import TaskGroup
from services.trainer.ranks.build import device_of
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.scoring.build import build_policy, build_reference
from services.trainer.scoring.leader import ScoringLeader, follow
from services.trainer.scoring.reference import ReferenceScoring
from services.trainer.scoring.server import ScoringServicer
from services.trainer.settings import TrainerSettings
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import WorkerSession
from services.wire.transferqueue.client import TransferQueueClient
from slipstream.trainer.v1 import scoring_pb2_grpc

_REFERENCE_VERSION = 0


async def serve_logp(settings: TrainerSettings) -> None:
    """Serves one run in the role logp."""
    command_group = CommandGroup(settings.world_size)
    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())
        servicer = ScoringServicer(
            settings.run_id,
            on_refused=lambda reason: session.report(state="loaded", activity=reason),
        )
        member = WeightMember(
            sink=servicer,
            # No GPU has room for a whole sharded model, so weights are received in host memory first.
            device=device_of(settings) if settings.world_size == 1 else torch.device("cpu"),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_ready=lambda version: session.report(
                state="ready", activity="", weight_version=version
            ),
        )

        def register(server: grpc.aio.Server) -> None:
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(servicer, server)
            serve_member(member, server)

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="logp", port=port))
        built = await load(stack, session, command_group, settings, build_policy)
        leader = ScoringLeader(built.scorer, built.fields, command_group=command_group, version=-1)
        servicer.attach(leader)
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="loaded", activity="")
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        await until_stopped(session, command_group)


async def follow_logp(start: FollowerStart) -> None:
    """Executes the commands of rank 0 in the role logp."""
    built = await start.build(build_policy)
    await asyncio.to_thread(follow, start.command_group, built.scorer, built.fields)


async def serve_ref_logp(settings: TrainerSettings) -> None:
    """Serves one run in the role ref_logp."""
    command_group = CommandGroup(settings.world_size)
    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())
        port = await stack.enter_async_context(serve(settings.bind, lambda server: None))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="ref_logp", port=port)
        )
        built = await load(stack, session, command_group, settings, build_reference)
        leader = ScoringLeader(
            built.scorer, built.fields, command_group=command_group, version=_REFERENCE_VERSION
        )
        address = session.transferqueue_address
        scoring = ReferenceScoring(
            session.spec,
            settings.run_id,
            leader=leader,
            queue=await stack.enter_async_context(TransferQueueClient.connect(address)),
        )
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="ready", activity="", weight_version=_REFERENCE_VERSION)
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        async with TaskGroup() as tasks:
            work = tasks.create_task(scoring.run())
            await until_stopped(session, command_group)
            work.cancel()


async def follow_ref_logp(start: FollowerStart) -> None:
    """Executes the commands of rank 0 in the role ref_logp."""
    built = await start.build(build_reference)
    await asyncio.to_thread(follow, start.command_group, built.scorer, built.fields)
