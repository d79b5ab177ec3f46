"""Entry point of a trainer process. Rank 0 serves the controller; the other ranks execute its commands.

rank 0    register -> load -> serve steps and weights until the controller stops the worker
others    receive the run from rank 0 -> load -> execute commands until rank 0 stops them

The same entry point starts the roles critic (``critic.py``), logp and ref_logp (``scoring/worker.py``).
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import grpc
import torch
from torch import distributed
from transformers.utils import logging as transformers_logging

from services.common.host import usable_processors
from services.common.lifetime import report_ready
from services.common.rpc.server import serve
from services.common.runspec.loader import parse_spec
from services.common.security.credentials import acting_as
from services.common.settings import set_defaults
from services.common.task_group import leaves
from services.common.telemetry.logging import configure
from services.trainer import metrics
from services.trainer.algorithm.own import OwnFunctionError
from services.trainer.critic import serve_critic
from services.trainer.model.parallel import join_processes
from services.trainer.ranks.build import build_critic, build_rank, device_of, gpu_names
from services.trainer.ranks.command_group import CommandGroup, RankFailedError
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import Build, connect_data, load, until_stopped
from services.trainer.scoring.build import build_scorer
from services.trainer.scoring.leader import follow
from services.trainer.scoring.worker import serve_logp, serve_ref_logp
from services.trainer.server import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.steps.step import StepResult
from services.trainer.transfers import QueueTransfers
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import WorkerSession, open_rendezvous
from slipstream.trainer.v1 import trainer_pb2_grpc

_T = TypeVar("_T")


async def lead(settings: TrainerSettings) -> None:
    """Serves one run as rank 0."""
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
        if built.weights.sends_rows:
            member.source_addresses = addresses
        leader.attach(
            built.rank, command_group, weights=built.weights, state=built.state, step=built.step
        )
        if session.spec.topology.is_colocated:  # rollouts load next, into the same GPU memory
            await leader.sleep()
        report_ready(settings.ready_file, {"role": "trainer", "gpus": ",".join(gpu_names())})
        session.report(state="ready", activity="", weight_version=built.step)
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        await until_stopped(session, command_group)


async def run_follower(settings: TrainerSettings) -> None:
    """Executes the commands of rank 0."""
    command_group = CommandGroup(settings.world_size)
    with command_group.listening():
        await _follow(settings, command_group)


async def _follow(settings: TrainerSettings, command_group: CommandGroup) -> None:
    loop = asyncio.get_running_loop()
    order = await asyncio.to_thread(command_group.receive)
    start = json.loads(order.payload)
    spec = parse_spec(start["spec"])
    async with connect_data(start["transferqueue_address"], spec) as data:
        transfers = QueueTransfers(data, loop)

        def build(build_part: Build[_T]) -> _T:
            return build_part(
                spec,
                settings,
                transfers=transfers,
                progress=lambda step, steps: None,
            )

        if settings.role == "critic":
            critic = await asyncio.to_thread(build, build_critic)
            follower = Follower(command_group, critic.rank, values=critic.values)
            await asyncio.to_thread(follower.follow)
            return
        if settings.role in ("logp", "ref_logp"):
            scoring = await asyncio.to_thread(build, build_scorer)
            await asyncio.to_thread(follow, command_group, scoring.scorer, scoring.fields)
            return
        built = await asyncio.to_thread(build, build_rank)
        follower = Follower(command_group, built.rank, weights=built.weights, state=built.state)
        async with _serve_rows(settings, follower) as address:
            await asyncio.to_thread(command_group.gather, address)
            await asyncio.to_thread(follower.follow)
        await transfers.finish()


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


def main() -> None:
    """Runs ``python -m services.trainer`` and ``torchrun -m services.trainer``."""
    settings = TrainerSettings()
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="trainer",
        worker=f"{settings.worker_id}/{settings.rank}",
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Packs change size at every step; expandable segments let the next pack reuse freed memory.
    set_defaults({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.world_size > 1:
        join_processes(device=device, rank=settings.rank, world_size=settings.world_size)
    failures: list[BaseException] = []
    try:
        _work(settings)
    except* (OwnFunctionError, RankFailedError) as group:
        failures = leaves(group)
    if failures:  # the message says what is wrong; our traceback would only hide it
        sys.exit(str(failures[0]))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _work(settings: TrainerSettings) -> None:
    """Runs this rank's role until it ends."""
    if settings.rank > 0:
        # SIGTERM reaches all ranks at once, but rank 0 still needs the others to finish its current command.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with acting_as(settings.identity()):
            asyncio.run(run_follower(settings))
        return
    serve_role = {
        "trainer": lead,
        "critic": serve_critic,
        "logp": serve_logp,
        "ref_logp": serve_ref_logp,
    }[settings.role]
    with (
        acting_as(settings.identity()),
        settings.tracing("trainer", run=settings.run_id, worker=settings.worker_id),
    ):
        asyncio.run(_serve_measured(settings, serve_role))


async def _serve_measured(
    settings: TrainerSettings, serve_role: Callable[[TrainerSettings], Awaitable[None]]
) -> None:
    async with settings.serving_metrics():
        await serve_role(settings)


if __name__ == "__main__":
    main()
