"""A rollout worker: load, register, serve until the controller orders the end."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack

import grpc
import torch

from services.common.grpc_server import serve
from services.common.logging import configure
from services.common.metrics import serve_metrics
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.run import RunSpec
from services.common.weightsync.member import WeightMember
from services.common.weightsync.server import WeightSyncServicer
from services.controller.client import GroupFailure, WorkerSession
from services.rollout import metrics
from services.rollout.client import GroupAssignment
from services.rollout.data import open_sources
from services.rollout.engines.base import Engine
from services.rollout.engines.build import build_engine
from services.rollout.failures import GroupError
from services.rollout.prompts import PromptBook
from services.rollout.publish import GroupPublisher
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling import GroupSampler, Parts
from services.rollout.server import RolloutServicer
from services.rollout.settings import RolloutSettings
from services.rollout.weights import WeightReceiver
from services.rollout.workflows.load import load_workflow
from services.transferqueue.dataclient import DataClient
from slipstream.rollout.v1 import rollout_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc

logger = logging.getLogger(__name__)
_GAUGES_EVERY_S = 1.0


async def run(settings: RolloutSettings) -> None:
    """Serve one run."""
    device = _device(settings)
    servicer, receiver = RolloutServicer(), WeightReceiver()
    async with AsyncExitStack() as stack:
        member = WeightMember(
            sink=receiver,
            device=device,
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_adopted=lambda version: session.report(state="ready", weight_version=version),
        )

        def register(server: grpc.aio.Server) -> None:
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                WeightSyncServicer(member), server
            )

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="rollout", port=port)
        )
        session.report(state="loading", activity="loading model and data")
        spec = session.spec
        engine, parts = await _load(stack, session, device)
        sampler = await stack.enter_async_context(GroupSampler(parts, spec.rollout))
        servicer.attach(sampler, engine)
        receiver.attach(engine, interrupts=spec.rollout.partial_rollout)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        decoding = tasks.create_task(engine.run())
        reporting = tasks.create_task(_report_gauges(session, engine, parts.prompts))
        session.report(state="loaded", activity="")
        await _until_stopped(session)
        sampler.cancel_all()
        for task in (decoding, reporting):
            task.cancel()


async def _load(
    stack: AsyncExitStack, session: WorkerSession, device: torch.device
) -> tuple[Engine, Parts]:
    """Load model, data and rewards as the run's specification says."""
    spec: RunSpec = session.spec
    tokenizer = await asyncio.to_thread(load_tokenizer, spec.model)
    sources = await asyncio.to_thread(open_sources, spec.data)
    engine = await asyncio.to_thread(
        build_engine,
        spec.rollout,
        spec.model,
        tokenizer,
        dtype=getattr(torch, spec.trainer.dtype),
        device=device,
    )
    pool = await stack.enter_async_context(RewardPool(spec.rollout.reward_concurrency))
    scorer = Scorer(spec.rollout.rewards, pool)
    await scorer.check()
    data = await stack.enter_async_context(DataClient.connect(session.transferqueue_address))

    async def report_failure(assignment: GroupAssignment, error: GroupError) -> None:
        failure = GroupFailure(
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            reason=error.reason,
            message=error.message,
            retryable=error.retryable,
        )
        await session.report_failures([failure])

    return engine, Parts(
        engine=engine,
        tokenizer=tokenizer,
        prompts=PromptBook(spec.data, sources, tokenizer),
        workflow=load_workflow(spec.rollout),
        reward=scorer,
        publisher=GroupPublisher(data),
        report_failure=report_failure,
    )


async def _report_gauges(session: WorkerSession, engine: Engine, prompts: PromptBook) -> None:
    """Keep heartbeats and metrics fresh."""
    rows = {f"prompts_{split}": prompts.num_rows(split) for split in ("train", "heldout")}
    while True:
        stats = engine.stats()
        metrics.RUNNING.set(stats.num_running)
        metrics.WAITING.set(stats.num_waiting)
        metrics.KV_USED.set(stats.kv_used_fraction)
        metrics.TOKENS_TOTAL.set(stats.tokens_total)
        session.report(
            gauges={
                **rows,
                "running_samples": stats.num_running,
                "waiting_samples": stats.num_waiting,
                "tokens_total": stats.tokens_total,
                "idle_seconds": stats.idle_seconds,
            }
        )
        await asyncio.sleep(_GAUGES_EVERY_S)


async def _until_stopped(session: WorkerSession) -> None:
    """Wait for the controller's order or a signal."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(session.stopped()), group.create_task(signalled.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _device(settings: RolloutSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def main() -> None:
    """Entry point of ``python -m services.rollout``."""
    settings = RolloutSettings()  # type: ignore[call-arg]  # required fields come from the environment
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="rollout",
        worker=settings.worker_id,
    )
    with serve_metrics(settings.metrics_port):
        asyncio.run(run(settings))


if __name__ == "__main__":
    main()
