"""gRPC face of the controller: runs for clients, membership and rendezvous for workers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import timestamp_pb2

from services.common.clock import Clock
from services.common.errors import InvalidArgumentError
from services.common.spec.loader import SpecError, canonical_json, parse_spec, spec_digest
from services.controller.client import GroupFailure, WorkerRole, WorkerState
from services.controller.membership import HeartbeatOutcome, Membership, Worker
from services.controller.rendezvous import RendezvousStore
from services.controller.runs import RunManager
from services.controller.settings import ControllerSettings
from services.controller.store.records import RequestKey, Run, Submission
from slipstream.controller.v1 import (
    membership_pb2,
    membership_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)
from slipstream.type.v1 import worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]
_MAX_PAGE = 500
_DEFAULT_PAGE = 50

_ROLES: dict[int, WorkerRole] = {
    worker_pb2.WORKER_ROLE_TRAINER: "trainer",
    worker_pb2.WORKER_ROLE_ROLLOUT: "rollout",
}
_STATES: dict[int, WorkerState] = {
    worker_pb2.WORKER_STATE_LOADING: "loading",
    worker_pb2.WORKER_STATE_LOADED: "loaded",
    worker_pb2.WORKER_STATE_READY: "ready",
    worker_pb2.WORKER_STATE_DRAINING: "draining",
    worker_pb2.WORKER_STATE_FAILED: "failed",
}
_ORDERS: dict[HeartbeatOutcome, membership_pb2.HeartbeatResponse.Order.ValueType] = {
    "continue": membership_pb2.HeartbeatResponse.ORDER_CONTINUE,
    "register": membership_pb2.HeartbeatResponse.ORDER_REGISTER,
    "stop": membership_pb2.HeartbeatResponse.ORDER_STOP,
}


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """Runs for clients."""

    def __init__(self, manager: RunManager) -> None:
        self._manager = manager

    async def CreateRun(self, request: run_pb2.CreateRunRequest, context: _Context) -> run_pb2.Run:  # noqa: N802
        """Submit a run."""
        try:
            spec = parse_spec(request.spec_json)
        except SpecError as error:
            raise InvalidArgumentError(str(error)) from error
        if request.validate_only:
            return run_pb2.Run(spec_json=canonical_json(spec), spec_digest=spec_digest(spec))
        key = RequestKey.of("grpc:CreateRun", request.request_id, canonical_json(spec))
        run, _ = await self._manager.create(Submission(spec=spec, request=key))
        return _to_proto(run)

    async def GetRun(self, request: run_pb2.GetRunRequest, context: _Context) -> run_pb2.Run:  # noqa: N802
        """One run."""
        return _to_proto(await self._manager.get(_run_id(request.name)))

    async def ListRuns(  # noqa: N802
        self, request: run_pb2.ListRunsRequest, context: _Context
    ) -> run_pb2.ListRunsResponse:
        """List runs, newest first."""
        if request.page_size < 0:
            raise InvalidArgumentError(
                f"page_size must not be negative, but is {request.page_size}"
            )
        size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        runs = await self._manager.list_runs(limit=size + 1, before=request.page_token or None)
        return run_pb2.ListRunsResponse(
            runs=[_to_proto(run) for run in runs[:size]],
            next_page_token=runs[size - 1].run_id if len(runs) > size else "",
        )

    async def CancelRun(self, request: run_pb2.CancelRunRequest, context: _Context) -> run_pb2.Run:  # noqa: N802
        """End a run."""
        return _to_proto(await self._manager.cancel(_run_id(request.name)))

    async def WatchRun(  # noqa: N802
        self, request: run_pb2.WatchRunRequest, context: _Context
    ) -> AsyncIterator[run_pb2.RunEvent]:
        """Events of a run as they come."""
        async for event in self._manager.feed.watch(_run_id(request.name), request.after_seq):
            yield run_pb2.RunEvent(
                seq=event.seq,
                time=_timestamp(event.time),
                type=event.type,
                message=event.message,
                data_json=json.dumps(dict(event.data)),
            )


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Registration and heartbeats of workers."""

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

    async def RegisterWorker(  # noqa: N802
        self, request: membership_pb2.RegisterWorkerRequest, context: _Context
    ) -> membership_pb2.RegisterWorkerResponse:
        """Take in a worker and hand it the specification."""
        if request.role not in _ROLES:
            raise InvalidArgumentError(
                f"a worker's role must be trainer or rollout, got {request.role}"
            )
        run = await self._manager.get(request.run_id)
        is_replaced = await self._membership.register(
            Worker(
                run_id=request.run_id,
                worker_id=request.worker_id,
                incarnation=request.incarnation,
                role=_ROLES[request.role],
                address=request.address,
                host_id=request.host_id,
                last_heard=self._clock.monotonic(),
            )
        )
        if is_replaced:
            self._manager.worker_replaced(request.run_id, request.worker_id)
        return membership_pb2.RegisterWorkerResponse(
            spec_json=run.spec_json,
            spec_digest=run.spec_digest,
            transferqueue_address=self._settings.transferqueue_address,
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
        )

    async def Heartbeat(  # noqa: N802
        self, request: membership_pb2.HeartbeatRequest, context: _Context
    ) -> membership_pb2.HeartbeatResponse:
        """Take in a heartbeat; the answer carries an order."""
        outcome = await self._membership.hear(
            request.run_id,
            request.worker_id,
            request.incarnation,
            state=_STATES.get(request.state, "loading"),
            activity=request.activity,
            weight_version=request.weight_version,
            gauges=request.gauges,
        )
        return membership_pb2.HeartbeatResponse(order=_ORDERS[outcome])

    async def ReportGroups(  # noqa: N802
        self, request: membership_pb2.ReportGroupsRequest, context: _Context
    ) -> membership_pb2.ReportGroupsResponse:
        """Take in groups that brought no samples."""
        failures = [
            GroupFailure(
                group_id=failure.group_id,
                attempt=failure.attempt,
                reason=failure.reason,
                message=failure.message,
                retryable=failure.retryable,
                num_unfinished=failure.unfinished_count,
                num_tokens=failure.token_count,
            )
            for failure in request.failures
        ]
        await self._manager.report_failures(request.run_id, failures)
        return membership_pb2.ReportGroupsResponse()


class RendezvousServicer(membership_pb2_grpc.RendezvousServiceServicer):
    """Key-value scopes for weight groups."""

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store

    async def SetValue(  # noqa: N802
        self, request: membership_pb2.SetValueRequest, context: _Context
    ) -> membership_pb2.SetValueResponse:
        """Store a value."""
        await self._store.set(request.scope, request.key, request.value)
        return membership_pb2.SetValueResponse()

    async def GetValue(  # noqa: N802
        self, request: membership_pb2.GetValueRequest, context: _Context
    ) -> membership_pb2.GetValueResponse:
        """Return a value, waiting for it."""
        value = await self._store.get(request.scope, request.key, request.wait_timeout_s)
        return membership_pb2.GetValueResponse(value=value)

    async def AddValue(  # noqa: N802
        self, request: membership_pb2.AddValueRequest, context: _Context
    ) -> membership_pb2.AddValueResponse:
        """Add to a counter."""
        value = await self._store.add(request.scope, request.key, request.amount)
        return membership_pb2.AddValueResponse(value=value)


def _run_id(name: str) -> str:
    prefix, _, run_id = name.partition("/")
    if prefix != "runs" or not run_id:
        raise InvalidArgumentError(f"a run's name is 'runs/' and its id, but {name!r} came")
    return run_id


def _to_proto(run: Run) -> run_pb2.Run:
    return run_pb2.Run(
        name=f"runs/{run.run_id}",
        spec_json=run.spec_json,
        spec_digest=run.spec_digest,
        state=run_pb2.Run.State.Value(f"STATE_{run.state.value}"),
        state_reason=run.state_reason,
        message=run.message,
        step=run.step,
        weight_version=run.weight_version,
        create_time=_timestamp(run.create_time),
        update_time=_timestamp(run.update_time),
        revision=run.revision,
    )


def _timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
