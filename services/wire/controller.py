"""Worker's connection to its controller: registration, heartbeats, reports, rendezvous.

Imports no torch. Example::

    async with WorkerSession(settings, role="rollout", port=port) as session:
        session.report(state="ready", weight_version=0)
        await session.stopped()
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypeVar

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.fields import new_id
from services.common.host import host_id
from services.common.messages import to_message
from services.common.rpc.client import call, open_channel
from services.common.runspec.loader import parse_spec, spec_digest
from services.common.runspec.run import RunSpec
from services.common.settings import WorkerSettings
from services.common.task_group import TaskGroup
from slipstream.controller.v1 import membership_pb2 as pb
from slipstream.controller.v1 import membership_pb2_grpc
from slipstream.type.v1 import worker_pb2

logger = logging.getLogger(__name__)

WorkerState = Literal["loading", "loaded", "ready", "draining", "failed"]

_T = TypeVar("_T")


def state_number(state: WorkerState) -> worker_pb2.WorkerState.ValueType:
    return worker_pb2.WorkerState.Value(f"WORKER_STATE_{state.upper()}")


CUT_OFF_GAUGE: Final = "cut_off"
"""Gauge of a worker: 1 while it cannot reach the transferqueue, with the cause in its activity."""
WORKER_EVENTS: Final = frozenset(
    {"EngineRouterListed", "EngineServerLost", "EngineServerRefused", "EngineServerServes"}
    | {"EngineServerOverloaded"}
    | {"CheckpointUploaded", "CheckpointUploadFailing", "CheckpointUploadResumed"}
)
"""Types of the events that a worker may report. The controller records all others itself."""
_MAX_EVENTS: Final = 32

_CALL_TIMEOUT_S = 10.0
_OUTAGE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """Failure of a group: its generation produced no samples."""

    group_id: str
    attempt: int
    """Attempt of the group, from 1."""
    reason: str
    """Stable code, for example ``prompt_too_long`` or ``reward_timeout``."""
    message: str
    """Explanation for people."""
    retryable: bool
    """True if another attempt could succeed."""
    worker_id: str = ""
    """Worker that reports the failure; the controller takes it from the request."""
    num_unfinished: int = 0
    """Unfinished members, if the group was interrupted."""
    num_tokens: int = 0
    """Tokens generated so far, if the group was interrupted."""


@dataclass(slots=True)
class _Report:
    state: WorkerState = "loading"
    activity: str = ""
    weight_version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    failure_code: str = ""


class WorkerSession:
    """Registered worker. Entering the context registers it; leaving ends its heartbeats.

    Args:
        settings: Address of the controller, and the run and id of this worker.
    """

    spec: RunSpec
    """The run's specification, available after entering. Heartbeats bring changes: read a key that
    may change (``PATCH /v1/runs/{run_id}``) here each time."""
    transferqueue_address: str
    """``host:port`` of the transferqueue, available after entering."""

    def __init__(self, settings: WorkerSettings, *, role: str, port: int) -> None:
        self.run_id = settings.run_id
        self._settings = settings
        self._role = role
        self._address = f"{settings.advertise_host}:{port}"
        self._incarnation = new_id("worker")
        self._spec_digest = ""
        self._report = _Report()
        self._events: list[pb.WorkerEvent] = []
        self._num_events = 0
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._interval_s = 1.0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(
                open_channel(self._settings.controller_address, "controller")
            )
            self._members = membership_pb2_grpc.MembershipServiceStub(channel)
            self._meetings = membership_pb2_grpc.RendezvousServiceStub(channel)
            await self._register()
            self._tasks = await stack.enter_async_context(TaskGroup())
            heartbeats = self._tasks.create_task(self._send_heartbeats())
            stack.callback(heartbeats.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    def report(
        self,
        *,
        state: WorkerState | None = None,
        activity: str | None = None,
        weight_version: int | None = None,
        gauges: Mapping[str, float] | None = None,
    ) -> None:
        """Updates the content of the heartbeats; omitted arguments keep their values.

        A change of anything but gauges is sent at once. After a failure, calls have no effect. A worker in
        the state ``draining`` leaves it only by failing, even if it adopts weights meanwhile.
        """
        if self._report.state == "failed":
            return
        if state is not None and (self._report.state != "draining" or state == "failed"):
            self._report.state = state
        if activity is not None:
            self._report.activity = activity
        if weight_version is not None:
            self._report.weight_version = weight_version
        if gauges is not None:
            self._report.gauges.update(gauges)
        if state is not None or activity is not None or weight_version is not None:
            self._changed.set()

    async def report_own_failure(self, cause: str, *, code: str = "") -> None:
        """Reports at once why this worker ends; does nothing if the controller does not answer.

        Args:
            code: Code with which the run ends, if another start of this worker would fail in the same way.
        """
        self._report.failure_code = code
        self.report(state="failed", activity=cause)
        with suppress(UnavailableError, DeadlineExceededError):
            await self._send_heartbeat()

    def report_event(self, kind: str, message: str, *, step: int = 0, key: str = "") -> None:
        """Records an event of the run, with the next heartbeat.

        Args:
            kind: One of ``WORKER_EVENTS``.
            message: Explanation for people.
            step: Training step that it is about; 0 for none.
            key: Identity of what happened, which the run records once; empty for what may happen again.
        """
        assert kind in WORKER_EVENTS, kind
        self._num_events += 1
        self._events.append(
            pb.WorkerEvent(number=self._num_events, type=kind, message=message, step=step, key=key)
        )
        del self._events[:-_MAX_EVENTS]
        self._changed.set()

    async def send_events(self) -> None:
        """Waits until the run has recorded all events that were reported.

        Raises:
            UnavailableError: If the controller does not answer in time.
        """
        while self._events:
            try:
                await self._send_heartbeat()
            except DeadlineExceededError as error:
                raise UnavailableError(f"{error.message}; the events are sent again") from error

    def report_outages(self, outage: Callable[[], str]) -> None:
        """Reports, from now on, while this worker cannot reach the transferqueue.

        Args:
            outage: Returns the cause; empty if the transferqueue can be reached.
        """
        watching = self._tasks.create_task(self._watch_outages(outage))
        self._stack.callback(watching.cancel)

    async def _watch_outages(self, outage: Callable[[], str]) -> None:
        was_cut_off = False
        while True:
            cause = outage()
            if cause or was_cut_off:
                self.report(activity=cause, gauges={CUT_OFF_GAUGE: float(bool(cause))})
            was_cut_off = bool(cause)
            await asyncio.sleep(_OUTAGE_EVERY_S)

    async def report_failures(self, failures: Sequence[GroupFailure]) -> None:
        """Reports to the controller the groups whose generation produced no samples."""
        request = pb.ReportGroupsRequest(
            run_id=self._settings.run_id,
            worker_id=self._settings.worker_id,
            failures=[to_message(failure, pb.GroupFailure) for failure in failures],
        )
        await call(
            self._members.ReportGroups,
            request,
            timeout_s=self._settings.controller_timeout_s,
            idempotent=True,
        )

    async def stopped(self) -> None:
        """Waits until the controller orders this worker to stop."""
        await self._stopped.wait()

    def rendezvous(self, scope: str) -> "Rendezvous":
        """Returns the key-value store through which the members of one weight group meet."""
        return Rendezvous(self._meetings, asyncio.get_running_loop(), scope)

    async def _register(self) -> None:
        request = pb.RegisterWorkerRequest(
            run_id=self._settings.run_id,
            worker_id=self._settings.worker_id,
            incarnation=self._incarnation,
            role=self._role,
            address=self._address,
            host_id=host_id(),
        )
        response = await call(
            self._members.RegisterWorker,
            request,
            timeout_s=self._settings.controller_timeout_s,
            idempotent=True,
        )
        self._take_spec(response.spec_json, response.spec_digest)
        self.transferqueue_address = response.transferqueue_address
        self.run_create_time = response.run_create_time
        self._interval_s = response.heartbeat_interval_s

    def _take_spec(self, text: str, digest: str) -> None:
        """Checks and stores the run's specification.

        Raises:
            DataLossError: If its digest differs from the one that the controller states.
            FailedPreconditionError: If it names what this host does not allow.
        """
        spec = parse_spec(text)
        if spec_digest(spec) != digest:
            raise DataLossError(
                "the run specification that arrived does not have the digest that the controller stated; "
                "controller and worker run different releases: install the same one"
            )
        if problems := self._settings.allowance.problems_here(spec):
            raise FailedPreconditionError("; ".join(problems))
        self.spec, self._spec_digest = spec, digest

    async def _send_heartbeats(self) -> None:
        clock = asyncio.get_running_loop().time
        last_answer = clock()
        while not self._stopped.is_set():
            self._changed.clear()
            try:
                await self._send_heartbeat()
                last_answer = clock()
            except (UnavailableError, DeadlineExceededError) as error:
                silent_s = clock() - last_answer
                logger.warning("controller does not answer", extra={"silent_s": round(silent_s, 1)})
                if silent_s > self._settings.controller_timeout_s:
                    raise UnavailableError(
                        f"no answer from the controller at {self._settings.controller_address} for "
                        f"{silent_s:.0f} s; this worker ends"
                    ) from error
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _send_heartbeat(self) -> None:
        request = pb.HeartbeatRequest(
            run_id=self._settings.run_id,
            worker_id=self._settings.worker_id,
            incarnation=self._incarnation,
            state=state_number(self._report.state),
            activity=self._report.activity,
            weight_version=self._report.weight_version,
            gauges=self._report.gauges,
            spec_digest=self._spec_digest,
            failure_code=self._report.failure_code,
            events=self._events,
        )
        response = await call(
            self._members.Heartbeat, request, timeout_s=_CALL_TIMEOUT_S, idempotent=True
        )
        # A controller that does not know this worker, because it has just started, has recorded none.
        if request.events and response.order != pb.HeartbeatResponse.ORDER_REGISTER:
            last = request.events[-1].number
            self._events = [event for event in self._events if event.number > last]
        if response.spec_json:
            self._take_spec(response.spec_json, response.spec_digest)
            logger.info(
                "the run's specification has changed", extra={"digest": response.spec_digest}
            )
        # A controller of an earlier release sends the interval only at registration.
        self._interval_s = response.heartbeat_interval_s or self._interval_s
        if response.order == pb.HeartbeatResponse.ORDER_STOP:
            self._stopped.set()
        elif response.order == pb.HeartbeatResponse.ORDER_REGISTER:
            await self._register()


@asynccontextmanager
async def open_rendezvous(address: str) -> AsyncIterator[Callable[[str], "Rendezvous"]]:
    """Opens rendezvous for a process that is no registered worker, such as a trainer rank other than 0.

    Yields:
        A function that returns the :class:`Rendezvous` of a scope.
    """
    async with open_channel(address, "controller") as channel:
        meetings = membership_pb2_grpc.RendezvousServiceStub(channel)
        loop = asyncio.get_running_loop()
        yield lambda scope: Rendezvous(meetings, loop, scope)


class Rendezvous:
    """Blocking key-value store over the session's channel, for threads other than the event loop's."""

    def __init__(
        self,
        stub: "membership_pb2_grpc.RendezvousServiceAsyncStub",
        loop: asyncio.AbstractEventLoop,
        scope: str,
    ) -> None:
        self._stub = stub
        self._loop = loop
        self._scope = scope

    def set(self, key: str, value: bytes) -> None:
        request = pb.SetValueRequest(scope=self._scope, key=key, value=value)
        work = call(self._stub.SetValue, request, timeout_s=_CALL_TIMEOUT_S, idempotent=True)
        self._run(work, _CALL_TIMEOUT_S)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns a value; waits at most ``timeout_s`` seconds for it."""
        request = pb.GetValueRequest(scope=self._scope, key=key, wait_timeout_s=timeout_s)
        deadline_s = timeout_s + _CALL_TIMEOUT_S / 2
        work = call(self._stub.GetValue, request, timeout_s=deadline_s, idempotent=True)
        return self._run(work, timeout_s + _CALL_TIMEOUT_S).value

    def add(self, key: str, amount: int) -> int:
        request = pb.AddValueRequest(scope=self._scope, key=key, amount=amount)
        work = call(self._stub.AddValue, request, timeout_s=_CALL_TIMEOUT_S)
        return self._run(work, _CALL_TIMEOUT_S).value

    def _run(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
