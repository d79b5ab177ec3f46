"""The run API over gRPC: the operations of the REST API, on the same runs, for the same principals."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from pydantic import BaseModel, ValidationError

from services.common.errors import InvalidArgumentError
from services.common.spec.loader import SpecError, canonical_json, parse_spec, spec_digest
from services.controller.api.commands import Access, submission_of
from services.controller.api.models import (
    CancelOptions,
    ForkRequest,
    PauseOptions,
    RunPatch,
    SubmitOptions,
)
from services.controller.api.page_tokens import PageTokens
from services.controller.api.principals import DEVELOPER, Authenticator, Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.api.roles import Role
from services.controller.api.rpc_messages import (
    checkpoint_message,
    event_message,
    point_message,
    run_id_of,
    run_message,
    sample_message,
    worker_message,
)
from services.controller.audit import RunAudit
from services.controller.logs import RunLogs
from services.controller.run.run_state import RunState
from services.controller.runs import RunManager
from services.controller.store.records import RequestKey, Run, RunFilter
from slipstream.controller.v1 import run_pb2 as pb
from slipstream.controller.v1 import run_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_Model = TypeVar("_Model", bound=BaseModel)
_MAX_PAGE = 500
_DEFAULT_PAGE = 50


class RunServicer(run_pb2_grpc.RunServiceServicer):  # methods are named by the protocol
    """Runs for clients.

    Args:
        manager: The runs.
        audit: What they did.
        logs: What their workers wrote.
        users: Who may ask; None lets everybody who reaches the port be the developer.
        limits: How much they may ask.
    """

    def __init__(
        self,
        manager: RunManager,
        audit: RunAudit,
        logs: RunLogs,
        users: Authenticator | None,
        limits: RequestLimits,
    ) -> None:
        self._manager = manager
        self._audit = audit
        self._logs = logs
        self._users = users
        self._limits = limits
        self._access = Access(manager)
        self._pages = PageTokens()

    async def CreateRun(self, request: pb.CreateRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Submit a run."""
        who = await self._who(context)
        who.demand("operator")
        with _refusals():
            spec = parse_spec(request.spec_json)
            self._manager.policy.check(spec)
        who.demand_submit(spec)
        if request.validate_only:
            return pb.Run(spec_json=canonical_json(spec), spec_digest=spec_digest(spec))
        with _refusals():
            options = SubmitOptions(priority=request.priority, labels=dict(request.labels))
        scope = f"{who.project}/{who.name} CreateRun"
        submission = submission_of(spec, options, who, scope=scope, key=request.request_id)
        run, _ = await self._manager.create(submission)
        return self._message(run)

    async def GetRun(self, request: pb.GetRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """One run."""
        return self._message(await self._run(request, context))

    async def ListRuns(  # noqa: N802
        self, request: pb.ListRunsRequest, context: _Context
    ) -> pb.ListRunsResponse:
        """List the runs of the project."""
        who = await self._who(context)
        if request.page_size < 0:
            raise InvalidArgumentError(
                f"page_size must not be negative, but is {request.page_size}"
            )
        size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        key, _, value = request.label.partition("=")
        state = pb.Run.State.Name(request.state).removeprefix("STATE_")
        only = RunFilter(
            project=who.project,
            state=None if state == "UNSPECIFIED" else RunState(state),
            name=request.run_name or None,
            label=(key, value) if request.label else None,
            is_oldest_first=request.oldest_first,
        )
        scope = repr(only)
        after = self._pages.read(request.page_token, scope)
        runs = await self._manager.list_runs(limit=size + 1, after=after, only=only)
        has_more = len(runs) > size
        return pb.ListRunsResponse(
            runs=[self._message(run) for run in runs[:size]],
            next_page_token=self._pages.make(runs[size - 1].run_id, scope) if has_more else "",
        )

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Change a run."""
        run, who = await self._operated(request, context)
        patch = _parsed(RunPatch, request.patch_json)
        with _refusals():
            changed = await self._manager.patch(
                run.run_id, patch, revision=request.revision, actor=who.name
            )
        return self._message(changed)

    async def DeleteRun(  # noqa: N802
        self, request: pb.DeleteRunRequest, context: _Context
    ) -> pb.DeleteRunResponse:
        """Forget a run that has ended."""
        run = await self._run(request, context, "admin")
        await self._manager.delete(
            run.run_id, revision=request.revision, delete_checkpoints=request.delete_checkpoints
        )
        return pb.DeleteRunResponse()

    async def CancelRun(self, request: pb.CancelRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """End a run."""
        run, who = await self._operated(request, context)
        with _refusals():
            options = CancelOptions(
                grace_seconds=request.grace_s, save_checkpoint=request.save_checkpoint
            )
        return self._message(await self._manager.cancel(run.run_id, options, actor=who.name))

    async def PauseRun(self, request: pb.PauseRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Finish the current step, save a checkpoint if it is wanted, and stop the workers."""
        run, who = await self._operated(request, context)
        options = PauseOptions(checkpoint=not request.skip_checkpoint)
        return self._message(await self._manager.pause(run.run_id, options, actor=who.name))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Queue a paused run again."""
        run, who = await self._operated(request, context)
        return self._message(await self._manager.resume(run.run_id, actor=who.name))

    async def SaveRun(self, request: pb.SaveRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Save a checkpoint at the end of the current step."""
        run = await self._run(request, context, "operator")
        self._manager.drivers.running(run).save_soon()
        return self._message(run)

    async def EvaluateRun(self, request: pb.EvaluateRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Evaluate the weights that are served now."""
        run = await self._run(request, context, "operator")
        await self._manager.drivers.evaluate(run)
        return self._message(run)

    async def ForkRun(self, request: pb.ForkRunRequest, context: _Context) -> pb.Run:  # noqa: N802
        """Create a run that goes on from a checkpoint of another one."""
        parent, who = await self._operated(request, context)
        overrides = request.overrides_json or "{}"
        fork = _parsed(ForkRequest, f'{{"overrides": {overrides}}}').model_copy(
            update={"checkpoint_id": request.checkpoint_id, "name": request.run_name}
        )
        who.demand(fork.needed_role)
        scope = f"{who.project}/{who.name} ForkRun {parent.run_id}"
        key = RequestKey.of(scope, request.request_id, fork.model_dump_json())
        with _refusals():
            run = await self._manager.fork(parent, fork, actor=who.name, request=key)
        return self._message(run)

    async def WatchRun(  # noqa: N802
        self, request: pb.WatchRunRequest, context: _Context
    ) -> AsyncIterator[pb.RunEvent]:
        """Events of a run as they come."""
        run = await self._run(request, context)
        with self._limits.stream(run.project):
            async for events in self._manager.feed.watch(run.run_id, request.after_seq):
                for event in events:
                    yield event_message(event)

    async def WatchRuns(  # noqa: N802
        self, request: pb.WatchRunsRequest, context: _Context
    ) -> AsyncIterator[pb.RunEvent]:
        """Events of all runs of the project as they come."""
        who = await self._who(context)
        after = request.after_time or None
        with self._limits.stream(who.project):
            async for events in self._manager.feed.watch_project(who.project, after):
                for event in events:
                    yield event_message(event)

    async def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: _Context
    ) -> pb.ListEventsResponse:
        """Events of a run, in order."""
        run = await self._run(request, context)
        events = await self._manager.feed.page(
            run.run_id,
            after_seq=request.after_seq,
            limit=_between(request.limit, 1000, 1000),
            type_=request.type or None,
        )
        return pb.ListEventsResponse(events=map(event_message, events))

    async def ReadLogs(  # noqa: N802
        self, request: pb.ReadLogsRequest, context: _Context
    ) -> AsyncIterator[pb.LogLine]:
        """Ends of the workers' logs, and the lines that come."""
        run = await self._run(request, context)
        num_lines = _between(request.tail_lines, 100, 10_000)
        if not request.follow:
            for line in await self._logs.tail(run.run_id, request.component, num_lines):
                yield pb.LogLine(component=line.component, line=line.line)
            return
        with self._limits.stream(run.project):
            async for lines in self._logs.follow(run.run_id, request.component, num_lines, ""):
                for _, line in lines:
                    yield pb.LogLine(component=line.component, line=line.line)

    async def ListMetrics(  # noqa: N802
        self, request: pb.ListMetricsRequest, context: _Context
    ) -> pb.ListMetricsResponse:
        """Numbers of a run's steps."""
        run = await self._run(request, context)
        limit = _between(request.max_points, 1000, 2000)
        points = await self._audit.metrics(run.run_id, request.metric, request.from_step, limit)
        return pb.ListMetricsResponse(points=map(point_message, points))

    async def ListSamples(  # noqa: N802
        self, request: pb.ListSamplesRequest, context: _Context
    ) -> pb.ListSamplesResponse:
        """Groups and what became of them."""
        run = await self._run(request, context)
        num_steps = _between(request.step_count, 10, 100)
        samples = await self._audit.samples(run.run_id, request.after_step, num_steps)
        return pb.ListSamplesResponse(samples=map(sample_message, samples))

    async def ListCheckpoints(  # noqa: N802
        self, request: pb.ListCheckpointsRequest, context: _Context
    ) -> pb.ListCheckpointsResponse:
        """Checkpoints of a run, newest first."""
        run = await self._run(request, context)
        found = await self._audit.checkpoints(run.run_id)
        return pb.ListCheckpointsResponse(checkpoints=map(checkpoint_message, found))

    async def GetCheckpoint(  # noqa: N802
        self, request: pb.GetCheckpointRequest, context: _Context
    ) -> pb.Checkpoint:
        """One checkpoint."""
        run = await self._run(request, context)
        return checkpoint_message(await self._audit.checkpoint(run.run_id, request.checkpoint_id))

    async def DeleteCheckpoint(  # noqa: N802
        self, request: pb.DeleteCheckpointRequest, context: _Context
    ) -> pb.DeleteCheckpointResponse:
        """Delete a checkpoint that no run needs."""
        run, who = await self._operated(request, context)
        await self._manager.checkpoints.delete(run.run_id, request.checkpoint_id, actor=who.name)
        return pb.DeleteCheckpointResponse()

    async def GetTopology(self, request: pb.GetTopologyRequest, context: _Context) -> pb.Topology:  # noqa: N802
        """Registered workers of a run."""
        run = await self._run(request, context)
        workers = self._manager.workers(run.run_id)
        return pb.Topology(workers=map(worker_message, workers))

    async def GetQuota(self, request: pb.GetQuotaRequest, context: _Context) -> pb.Quota:  # noqa: N802
        """What the project may use, and uses."""
        quota = await self._manager.quota((await self._who(context)).project)
        return pb.Quota(
            project=quota.project,
            active_run_limit=quota.limits.max_active_runs,
            queued_run_limit=quota.limits.max_queued_runs,
            active_run_count=quota.active_runs,
            queued_run_count=quota.queued_runs,
            gpu_limit=quota.limits.max_gpus,
            gpu_count=quota.gpus,
            transferqueue_byte_limit=quota.limits.max_transferqueue_bytes,
            transferqueue_byte_count=quota.transferqueue_bytes,
            checkpoint_byte_limit=quota.limits.max_checkpoint_bytes,
            checkpoint_byte_count=quota.checkpoint_bytes,
            request_rate_limit=quota.limits.max_requests_per_second,
            event_stream_limit=quota.limits.max_event_streams,
            event_stream_count=self._limits.num_streams(quota.project),
        )

    async def GetVersion(self, request: pb.GetVersionRequest, context: _Context) -> pb.Version:  # noqa: N802
        """The release that answers."""
        await self._who(context)
        return pb.Version(version=version("slipstream"))

    async def _who(self, context: _Context) -> Principal:
        who = DEVELOPER
        if self._users is not None:
            sent = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
            who = await asyncio.to_thread(self._users.authenticate, sent)
        await self._limits.admit(who.project)
        return who

    async def _operated(self, request: Any, context: _Context) -> tuple[Run, Principal]:
        """A run, and who changes it."""
        who = await self._who(context)
        return await self._access.run(who, run_id_of(request.name), "operator"), who

    async def _run(self, request: Any, context: _Context, role: Role = "viewer") -> Run:
        return await self._access.run(await self._who(context), run_id_of(request.name), role)

    def _message(self, run: Run) -> pb.Run:
        return run_message(run, self._manager.drivers.activities(run.run_id))


class _refusals:  # noqa: N801
    """Turns what is wrong with a request into the error that the protocol has for it."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (SpecError, ValidationError)):
            raise InvalidArgumentError(str(error)) from error


def _parsed(model: type[_Model], text: str) -> _Model:
    with _refusals():
        return model.model_validate_json(text or "{}")


def _between(value: int, default: int, most: int) -> int:
    return min(value, most) if value > 0 else default
