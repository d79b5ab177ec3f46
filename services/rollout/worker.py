"""Rollout worker: registers, loads the model and data, serves until the run ends."""

import asyncio
import faulthandler
import logging
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc
import torch

from services.common.errors import InvalidArgumentError, ServiceError, UnavailableError
from services.common.lifetime import ending_with_outages, report_ready, wait_for_shutdown
from services.common.memory.rollout import BUCKET_BYTES, divide_slots
from services.common.messages import from_message
from services.common.rpc.server import serve
from services.common.runspec.engines import engine_kind
from services.common.runspec.weight_modes import STAGING_SLOTS
from services.common.security.credentials import acting_as
from services.common.task_group import TaskGroup, uninterrupted, until_first, unwrapped
from services.common.telemetry.logging import configure
from services.rollout.engines.base import EngineDiedError
from services.rollout.frozen_weights import FrozenWeights
from services.rollout.loading import RolloutLoader
from services.rollout.monitor import freeze_startup_objects, monitor
from services.rollout.sampling.sampler import GroupSampler
from services.rollout.settings import RolloutSettings
from services.rollout.weights import WeightReceiver
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import WorkerSession
from services.wire.workers import GroupAssignment, PromptHistory
from slipstream.rollout.v1 import rollout_pb2 as pb
from slipstream.rollout.v1 import rollout_pb2_grpc

logger = logging.getLogger(__name__)


async def run(settings: RolloutSettings) -> None:
    """Serves one run until the controller orders the end or a signal arrives."""
    device = _device(settings)
    servicer = RolloutServicer()
    # The server stops first, so that late callers get "unavailable" rather than closed components.
    async with AsyncExitStack() as stack, AsyncExitStack() as serving:
        receiver = WeightReceiver(
            on_refused=lambda reason: session.report(state="loaded", activity=reason),
            # Until these weights are checked, the controller must not count this rollout as ready with the
            # previous version.
            on_adopted=lambda: session.report(state="loaded"),
        )
        member = WeightMember(
            sink=receiver,
            device=device,
            peers=_peers(device),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_ready=lambda version: session.report(
                state="ready", activity="", weight_version=version
            ),
        )

        def register(server: grpc.aio.Server) -> None:
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
            serve_member(member, server)

        port = await serving.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="rollout", port=port)
        )
        session.report(state="loading", activity="importing the engine, opening the data")
        loader = RolloutLoader(stack, session, settings, device)
        engine, sampler, publisher = await loader.load()
        session.report(activity="starting the engine")
        tasks = await stack.enter_async_context(TaskGroup())
        # Reads the frozen weights while the engine starts, but after the engine's model was created: both
        # create models under torch's process-wide default dtype.
        reading = tasks.create_task(asyncio.to_thread(_frozen, loader, device))
        background = [
            tasks.create_task(engine.run()),
            tasks.create_task(
                monitor(
                    session,
                    engine,
                    sampler,
                    publish_wait_s=lambda: publisher.oldest_pending_s,
                )
            ),
        ]
        await engine.wait_ready()
        frozen = await reading
        freeze_startup_objects()
        servicer.attach(sampler)
        receiver.attach(
            engine, sampler, is_partial=session.spec.rollout.partial_rollout, frozen=frozen
        )
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        if session.spec.has_engine:
            session.report(state="loaded", activity="")
        else:  # the run has no engine that waits for weights
            session.report(state="ready", activity="", weight_version=0)
        await _serve_until_stopped(session, sampler, drain_timeout_s=settings.drain_timeout_s)
        for task in background:
            task.cancel()


def _frozen(loader: RolloutLoader, device: torch.device) -> FrozenWeights | None:
    """Reads the base weights that LoRA adapters are merged into, if only adapters are published."""
    spec = loader.spec
    lora = spec.trainer.lora
    if lora is None or spec.adds_adapters:
        return None
    if not (spec.sends_adapters and engine_kind(spec.rollout.engine).has_model):
        return None
    merged_slots = 0 if loader.memory is None else int(loader.memory.merged_slots)
    bucket_bytes, num_slots = divide_slots(STAGING_SLOTS * BUCKET_BYTES + merged_slots)
    return FrozenWeights(
        spec.model,
        loader.config,
        dtype=getattr(torch, spec.trainer.dtype),
        device=device,
        base_dtype=lora.base_dtype,
        bucket_bytes=bucket_bytes,
        num_slots=num_slots,
    )


async def _serve_until_stopped(
    session: WorkerSession, sampler: GroupSampler, *, drain_timeout_s: float
) -> None:
    """Serves until the controller orders the end or a signal arrives.

    After a signal, a run with partial rollout caches its unfinished groups first.
    """
    ordered, _ = await until_first(session.stopped(), wait_for_shutdown())
    sampler.refuse()
    if ordered.cancelled():
        session.report(state="draining", activity="ending")
        if session.spec.rollout.partial_rollout:
            await _store_unfinished(sampler, drain_timeout_s)
    sampler.cancel_all()


async def _store_unfinished(sampler: GroupSampler, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await sampler.interrupt()
    except (TimeoutError, ServiceError) as error:
        logger.warning("storing unfinished groups failed", extra={"why": repr(error)})


def _device(settings: RolloutSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def _peers(device: torch.device) -> list[torch.device]:
    """Returns the engine's GPUs after the first one; a rollout process sees only its engine's GPUs."""
    if device.type == "cpu":
        return []
    return [torch.device("cuda", index) for index in range(1, torch.cuda.device_count())]


async def _run_measured(settings: RolloutSettings) -> None:
    async with settings.serving_metrics():
        await run(settings)


def serve_rollout(settings: RolloutSettings) -> None:
    """Runs the worker until its run ends."""
    faulthandler.enable()
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="rollout",
        worker=settings.worker_id,
    )
    with (
        ending_with_outages(),
        acting_as(settings.identity()),
        settings.tracing("rollout", run=settings.run_id, worker=settings.worker_id),
    ):
        try:
            with unwrapped(EngineDiedError):
                asyncio.run(_run_measured(settings))
        except EngineDiedError as error:
            # Exits without a traceback, so that the last lines of the log, which the run reports, are the
            # engine's.
            sys.exit(f"{error}")


_Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Translates gRPC requests to calls of the sampler.

    Answers UNAVAILABLE until the sampler is attached: the port must be registered before the run's
    specification, and so the engine, can be loaded.
    """

    def __init__(self) -> None:
        self._sampler: GroupSampler | None = None

    def attach(self, sampler: GroupSampler) -> None:
        """Starts to serve requests with this sampler."""
        self._sampler = sampler

    async def StartGroups(
        self, request: pb.StartGroupsRequest, context: _Context
    ) -> pb.StartGroupsResponse:
        self._attached().start([_assignment(group) for group in request.groups])
        return pb.StartGroupsResponse()

    async def CancelGroups(
        self, request: pb.CancelGroupsRequest, context: _Context
    ) -> pb.CancelGroupsResponse:
        """Ends groups without results."""
        self._attached().cancel(request.group_ids)
        return pb.CancelGroupsResponse()

    async def InterruptGroups(
        self, request: pb.InterruptGroupsRequest, context: _Context
    ) -> pb.InterruptGroupsResponse:
        """Stops groups and caches their progress."""
        # Finish even if the call is cancelled: a stopped group must be reported, and the caller does not
        # name it again.
        await uninterrupted(self._attached().interrupt(request.group_ids or None))
        return pb.InterruptGroupsResponse()

    async def Sleep(self, request: pb.SleepRequest, context: _Context) -> pb.SleepResponse:
        """Releases the engine's GPU memory."""
        await self._attached().sleep()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: _Context) -> pb.WakeResponse:
        """Reclaims the engine's GPU memory."""
        await self._attached().wake()
        return pb.WakeResponse()

    def _attached(self) -> GroupSampler:
        if self._sampler is None:
            raise UnavailableError("this rollout worker is still loading its model; retry")
        return self._sampler


def _assignment(group: pb.GroupAssignment) -> GroupAssignment:
    problems = {
        "group_id must not be empty": not group.group_id,
        "attempt must be at least 1": group.attempt < 1,
        "first_attempt must be from 1 to attempt": not 1 <= group.first_attempt <= group.attempt,
        "partition_id must not be empty": not group.partition_id,
        "members must not be empty": not group.members,
        "members must be distinct and not negative": len({m for m in group.members if m >= 0})
        != len(group.members),
        "seeds must have one entry per member": len(group.seeds) != len(group.members),
        "temperatures must have one entry per member": len(group.temperatures)
        != len(group.members),
        "temperatures must not be negative": any(value < 0 for value in group.temperatures),
    }
    wrong = [problem for problem, is_true in problems.items() if is_true]
    if wrong:
        raise InvalidArgumentError(
            f"group {group.group_id!r}: {'; '.join(wrong)}", group_id=group.group_id
        )
    if not group.HasField("tried"):
        return from_message(group, GroupAssignment)
    return from_message(group, GroupAssignment, tried=from_message(group.tried, PromptHistory))
