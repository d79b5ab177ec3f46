"""A trainer worker: register, load, train and send weights until the controller orders the end."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc
import torch
from transformers.utils import logging as transformers_logging

from services.common.batch import KVBatchMeta
from services.common.grpc_server import serve
from services.common.jagged import Jagged
from services.common.logging import configure
from services.common.metrics import serve_metrics
from services.common.weightsync.member import WeightMember
from services.common.weightsync.server import WeightSyncServicer
from services.controller.client import WorkerSession
from services.trainer import metrics
from services.trainer.build import build_rank, device_of
from services.trainer.leader import Leader
from services.trainer.server import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepResult
from services.transferqueue.dataclient import DataClient
from slipstream.trainer.v1 import trainer_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc

logger = logging.getLogger(__name__)
_FETCH_TIMEOUT_S = 300.0
_PROGRESS_EVERY = 20


async def run(settings: TrainerSettings) -> None:
    """Serve one run."""
    leader = Leader()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:

        def on_step(step: int, result: StepResult) -> None:
            session.report(weight_version=step)
            metrics.observe_step(settings.run_id, step, result.metrics, skipped=result.skipped)

        member = WeightMember(
            source=leader,
            device=device_of(settings),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
        )

        def register(server: grpc.aio.Server) -> None:
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                TrainerServicer(leader, on_step), server
            )
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                WeightSyncServicer(member), server
            )

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="trainer", port=port)
        )
        session.report(state="loading", activity="loading the model")
        data = await stack.enter_async_context(DataClient.connect(session.transferqueue_address))

        def fetch(meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
            future = asyncio.run_coroutine_threadsafe(data.get(meta, fields), loop)
            return future.result(_FETCH_TIMEOUT_S)

        def progress(step: int, steps: int) -> None:
            if step % _PROGRESS_EVERY == 0:
                activity = f"warm start: step {step} of {steps}"
                loop.call_soon_threadsafe(lambda: session.report(activity=activity))

        built = await asyncio.to_thread(
            build_rank, session.spec, settings, fetch=fetch, progress=progress
        )
        leader.attach(built.rank, built.weights)
        session.report(state="ready", activity="", weight_version=0)
        await _until_stopped(session)


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


def main() -> None:
    """Entry point of ``python -m services.trainer``."""
    settings = TrainerSettings()
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="trainer",
        worker=settings.worker_id,
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(settings.rank)
    with serve_metrics(settings.metrics_port):
        asyncio.run(run(settings))


if __name__ == "__main__":
    main()
