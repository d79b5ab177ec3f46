"""Worker of the role trainer: serves steps and weights until the controller stops it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import grpc

from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.trainer import metrics
from services.trainer.ranks.build import build_rank, device_of, gpu_names
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.server import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.steps.step import StepResult
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import WorkerSession, open_rendezvous
from slipstream.trainer.v1 import trainer_pb2_grpc


async def serve_trainer(settings: TrainerSettings) -> None:
    """Serves one run as rank 0 of its trainer."""
    leader, command_group = Leader(), CommandGroup(settings.world_size)
    # `serving` closes first: calls that arrive during shutdown fail as unavailable before the objects that
    # would have answered them are closed.
    async with AsyncExitStack() as stack, AsyncExitStack() as serving:
        stack.enter_context(command_group.listening())
        member = WeightMember(
            source=leader,
            device=device_of(settings),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            folder=settings.state_directory,
        )

        def on_step(step: int, result: StepResult) -> None:
            metrics.observe_step(settings.run_id, step, result.metrics, skipped=result.skipped)
            session.report(weight_version=step)

        def on_saving(activity: str, gauges: Mapping[str, float]) -> None:
            session.report(activity=activity, gauges=gauges)

        def register(server: grpc.aio.Server) -> None:
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                TrainerServicer(leader, settings.run_id, on_step, on_saving), server
            )
            serve_member(member, server)

        port = await serving.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="trainer", port=port)
        )
        built = await load(stack, session, command_group, settings, build_rank)
        addresses = await asyncio.to_thread(
            command_group.gather, f"{settings.advertise_host}:{port}"
        )
        if built.rank.runner.engine.weights.sends_rows:
            member.source_addresses = addresses
        leader.attach(built.rank, command_group, step=built.step)
        if session.spec.topology.is_colocated:  # rollouts load next, into the same GPU memory
            await leader.sleep()
        report_ready(settings.ready_file, {"role": "trainer", "gpus": ",".join(gpu_names())})
        session.report(state="ready", activity="", weight_version=built.step)
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        await until_stopped(session, command_group)


async def follow_trainer(start: FollowerStart) -> None:
    """Executes the commands of rank 0 of the trainer."""
    built = await start.build(build_rank)
    follower = Follower(start.command_group, built.rank)
    async with _serve_rows(start.settings, follower) as address:
        await asyncio.to_thread(start.command_group.gather, address)
        await asyncio.to_thread(follower.follow)


@asynccontextmanager
async def _serve_rows(settings: TrainerSettings, follower: Follower) -> AsyncIterator[str]:
    """Serves this rank's rows to weight sessions; yields the address of its server."""
    async with open_rendezvous(settings.controller_address) as rendezvous:
        member = WeightMember(
            source=follower,
            device=device_of(settings),
            host=settings.advertise_host,
            rendezvous=rendezvous,
            folder=settings.state_directory,
        )
        # All ranks share their settings, and the port in these belongs to rank 0.
        host = settings.bind.rpartition(":")[0]
        async with serve(f"{host}:0", partial(serve_member, member)) as port:
            yield f"{settings.advertise_host}:{port}"
