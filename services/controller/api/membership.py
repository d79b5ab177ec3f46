"""gRPC services of the controller for its workers: membership and rendezvous."""

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import grpc

from services.common.errors import InvalidArgumentError, ServiceError, UnavailableError
from services.common.host import Clock
from services.common.messages import from_message
from services.common.runspec.workers import WORKERS
from services.controller.manager.runs import RunManager
from services.controller.membership import Membership, RendezvousStore, Worker
from services.controller.settings import ControllerSettings
from services.wire.controller import (
    WORKER_EVENTS,
    GroupFailure,
    WorkerState,
    state_number,
)
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc

_MAX_MESSAGE = 2048
"""Max characters of an event's message."""
_Context = grpc.aio.ServicerContext[Any, Any]

_STATES: dict[int, WorkerState] = {state_number(state): state for state in get_args(WorkerState)}


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Serves registration, heartbeats and failure reports of workers."""

    def __init__(
        self,
        manager: RunManager,
        membership: Membership,
        settings: ControllerSettings,
        clock: Clock,
    ) -> None:
        self._manager = manager
        self._membership = membership
        self._settings = settings
        self._clock = clock

    async def RegisterWorker(
        self, request: membership_pb2.RegisterWorkerRequest, context: _Context
    ) -> membership_pb2.RegisterWorkerResponse:
        if request.role not in WORKERS:
            raise InvalidArgumentError(
                f"role must be one of {', '.join(WORKERS.names())}, got {request.role!r}"
            )
        run = await self._manager.get(request.run_id)
        is_replaced = await self._membership.register(
            Worker(
                run_id=request.run_id,
                worker_id=request.worker_id,
                incarnation=request.incarnation,
                role=request.role,
                address=request.address,
                host_id=request.host_id,
                last_heartbeat=self._clock.monotonic(),
            )
        )
        if is_replaced:
            self._manager.drivers.worker_replaced(request.run_id, request.worker_id)
        return membership_pb2.RegisterWorkerResponse(
            spec_json=run.spec_json,
            spec_digest=run.spec_digest,
            transferqueue_address=self._settings.transferqueue_address,
            heartbeat_interval_s=self._interval_s(),
            run_create_time=run.create_time,
        )

    async def _await_recording(self, request: membership_pb2.HeartbeatRequest) -> None:
        """Records events even if the caller leaves meanwhile; it would repeat what is being written.

        Raises:
            UnavailableError: If that fails or takes long; the worker reports again. Others would end it.
        """
        worker = self._membership.find(request.run_id, request.worker_id)
        if worker is None or worker.incarnation != request.incarnation or not request.events:
            return
        worker.last_heartbeat = self._clock.monotonic()  # a slow database makes no worker silent
        tasks = self._manager.drivers.tasks
        task = tasks.create_task(self._record_events(worker, request.events))
        await asyncio.wait([task], timeout=self._settings.heartbeat_timeout_s / 4)
        if failure := task.result() if task.done() else "the events are being recorded":
            raise UnavailableError(f"{failure}; report again")

    async def _record_events(
        self, worker: Worker, events: Sequence[membership_pb2.WorkerEvent]
    ) -> str:
        """Returns why not all events are recorded; empty if they are."""
        try:
            async with worker.recording:
                for event in events:
                    if event.type in WORKER_EVENTS and event.number > worker.last_event:
                        key, message = event.key[:_MAX_MESSAGE], event.message[:_MAX_MESSAGE]
                        await self._manager.drivers.worker_reported(
                            worker, event.type, message, step=event.step, key=key
                        )
                        worker.last_event = event.number
        except ServiceError as error:
            return error.message
        return ""

    async def Heartbeat(
        self, request: membership_pb2.HeartbeatRequest, context: _Context
    ) -> membership_pb2.HeartbeatResponse:
        """Records a heartbeat; returns an order and, if it has changed, the specification."""
        # Before the state, on whose change the run goes on, and before the answer, which acknowledges them.
        await self._await_recording(request)
        outcome = await self._membership.record_heartbeat(
            request.run_id,
            request.worker_id,
            request.incarnation,
            state=_STATES.get(request.state, "loading"),
            activity=request.activity,
            weight_version=request.weight_version,
            gauges=request.gauges,
        )
        if outcome == "continue" and _STATES.get(request.state) == "failed":
            self._manager.drivers.worker_failed(
                request.run_id,
                request.worker_id,
                cause=request.activity,
                final_code=request.failure_code,
            )
        spec_json = spec_digest = ""
        # A worker of an earlier release sends no digest and does not read a specification here.
        if outcome == "continue" and request.spec_digest:
            driver = self._manager.drivers.find(request.run_id)
            if driver is not None:
                spec_json, spec_digest = driver.newer_spec(request.spec_digest)
        return membership_pb2.HeartbeatResponse(
            order=membership_pb2.HeartbeatResponse.Order.Value(f"ORDER_{outcome.upper()}"),
            heartbeat_interval_s=self._interval_s(),
            spec_json=spec_json,
            spec_digest=spec_digest,
        )

    async def ReportGroups(
        self, request: membership_pb2.ReportGroupsRequest, context: _Context
    ) -> membership_pb2.ReportGroupsResponse:
        failures = [
            from_message(failure, GroupFailure, worker_id=request.worker_id)
            for failure in request.failures
        ]
        await self._manager.drivers.report_failures(request.run_id, failures)
        return membership_pb2.ReportGroupsResponse()

    def _interval_s(self) -> float:
        """Returns the seconds between two heartbeats of a worker."""
        settings = self._settings
        fair_s = self._membership.num_workers / settings.max_heartbeats_per_s
        return max(settings.heartbeat_interval_s, min(fair_s, settings.heartbeat_timeout_s / 4))


class RendezvousServicer(membership_pb2_grpc.RendezvousServiceServicer):
    """Serves the key-value store through which members of weight groups meet."""

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store

    async def SetValue(
        self, request: membership_pb2.SetValueRequest, context: _Context
    ) -> membership_pb2.SetValueResponse:
        await self._store.set(request.scope, request.key, request.value)
        return membership_pb2.SetValueResponse()

    async def GetValue(
        self, request: membership_pb2.GetValueRequest, context: _Context
    ) -> membership_pb2.GetValueResponse:
        value = await self._store.get(request.scope, request.key, request.wait_timeout_s)
        return membership_pb2.GetValueResponse(value=value)

    async def AddValue(
        self, request: membership_pb2.AddValueRequest, context: _Context
    ) -> membership_pb2.AddValueResponse:
        value = await self._store.add(request.scope, request.key, request.amount)
        return membership_pb2.AddValueResponse(value=value)
