"""Worker of the role trainer: serves one run until the controller stops it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import grpc

from services.common.errors import ServiceError
from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.common.task_group import TaskGroup
from services.trainer import metrics
from services.trainer.ranks.build import build_rank, device_of, gpu_names
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.server import TrainerServicer, send_uploads
from services.trainer.settings import TrainerSettings
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import WorkerSession, open_rendezvous
from slipstream.trainer.v1 import trainer_pb2_grpc

_REPORT_EVERY_S = 1.0


async def serve_trainer(settings: TrainerSettings) -> None:
    leader = Leader()
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)
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

        def register(server: grpc.aio.Server) -> None:
            servicer = TrainerServicer(
                leader, settings.run_id, metrics.observe_step, lambda: session
            )
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)
            serve_member(member, server)

        port = await serving.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="trainer", port=port)
        )
        trainer = await load(stack, session, command_group, settings, build_rank)
        addresses = await asyncio.to_thread(
            command_group.gather, f"{settings.advertise_host}:{port}"
        )
        if trainer.rank.runner.engine.weights.sends_rows:
            member.source_addresses = addresses
        leader.attach(trainer.rank, command_group, step=trainer.step)
        if session.spec.topology.is_colocated:  # rollouts load next, into the same GPU memory
            await leader.sleep()
        report_ready(settings.ready_file, {"role": "trainer", "gpus": ",".join(gpu_names())})
        await train_until_stopped(stack, leader, session, command_group, step=trainer.step)


async def train_until_stopped(
    stack: AsyncExitStack,
    leader: Leader,
    session: WorkerSession,
    command_group: CommandGroup,
    *,
    step: int,
) -> None:
    """Serves the run until the controller stops this worker or a rank fails; the stack then ends all ranks.

    Args:
        step: Newest step of the run.
    """
    stack.push_async_callback(_stop, leader, session)
    if leader.store is not None:
        leader.store.report(session)  # before the state, at which the run goes on
    session.report(state="ready", activity="", weight_version=step)
    async with TaskGroup() as tasks:
        reporting = tasks.create_task(_report_uploads(leader, session))
        await until_stopped(session, command_group)
        reporting.cancel()


async def follow_trainer(start: FollowerStart) -> None:
    """Executes the commands of rank 0 of the trainer."""
    trainer = await start.build(build_rank)
    follower = Follower(start.command_group, trainer.rank)
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


async def _stop(leader: Leader, session: WorkerSession) -> None:
    """Ends all ranks; the run's record then has the uploads that ended, unless no controller records them."""
    with suppress(ServiceError):  # first, because this process may be killed while a step ends
        await send_uploads(leader, session)
    await asyncio.to_thread(leader.stop)
    with suppress(ServiceError):
        await send_uploads(leader, session)


async def _report_uploads(leader: Leader, session: WorkerSession) -> None:
    """Reports until it is cancelled; returns at once if the run has no object store."""
    while leader.store is not None:
        leader.store.report(session)
        await asyncio.sleep(_REPORT_EVERY_S)
