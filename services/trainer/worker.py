"""Workers of the roles trainer and critic: serve one run until the controller stops them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import grpc

from services.common.errors import UnavailableError
from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.common.task_group import TaskGroup
from services.trainer import metrics
from services.trainer.ranks.build import build_critic, build_rank, device_of, gpu_names
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.server import TrainerServicer, send_uploads
from services.trainer.settings import TrainerSettings
from services.trainer.steps.fields import lacking
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.batch import KVBatchMeta
from services.wire.controller import WorkerSession, open_rendezvous
from slipstream.trainer.v1 import scoring_pb2 as pb
from slipstream.trainer.v1 import scoring_pb2_grpc, trainer_pb2_grpc


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
        stack.push_async_callback(_stop, leader, session)
        await _train_until_stopped(leader, session, command_group, step=trainer.step)


async def _train_until_stopped(
    leader: Leader, session: WorkerSession, command_group: CommandGroup, *, step: int
) -> None:
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


async def serve_critic(settings: TrainerSettings) -> None:
    leader = Leader(may_miss_steps=True)
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)

    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())

        def register(server: grpc.aio.Server) -> None:
            servicer = TrainerServicer(
                leader, settings.run_id, metrics.observe_critic_step, lambda: session
            )
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(ValuesServicer(leader), server)

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="critic", port=port))
        critic = await load(stack, session, command_group, settings, build_critic)
        leader.attach(critic.rank, command_group, values=critic.values, step=critic.step)
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        stack.push_async_callback(_stop, leader, session)
        await _train_until_stopped(leader, session, command_group, step=critic.step)


async def follow_critic(start: FollowerStart) -> None:
    """Executes the commands of rank 0 of the critic."""
    critic = await start.build(build_critic)
    follower = Follower(start.command_group, critic.rank, values=critic.values)
    await asyncio.to_thread(follower.follow)


_EVERY_S: Final = 1.0


async def _stop(leader: Leader, session: WorkerSession) -> None:
    """Ends all ranks; the run's record then has the uploads that ended, unless no controller answers."""
    with suppress(UnavailableError):  # first, because this process may be killed while a step ends
        await send_uploads(leader, session)
    await asyncio.to_thread(leader.stop)
    with suppress(UnavailableError):
        await send_uploads(leader, session)


async def _report_uploads(leader: Leader, session: WorkerSession) -> None:
    """Reports until it is cancelled; returns at once if the run has no object store."""
    while leader.store is not None:
        leader.store.report(session)
        await asyncio.sleep(_EVERY_S)
