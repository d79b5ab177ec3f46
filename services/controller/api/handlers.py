"""Handlers of the run API: one method per operation, named after it."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

from services.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from services.common.runspec.keys import fields_of, flat
from services.common.runspec.loader import SpecError, canonical_json, parse_spec, spec_digest
from services.common.runspec.run import RunSpec
from services.common.telemetry import tracing
from services.controller.api import operations as ops
from services.controller.api.principals import Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.fleets import Fleets, resolve_changes
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.quotas import Quota
from services.controller.manager.runs import RunManager
from services.controller.rules.run_state import RunState, desired_state
from services.controller.schemas import (
    CheckpointPage,
    CheckpointView,
    DefaultsView,
    EventPage,
    EventView,
    FleetPage,
    FleetView,
    GroupPage,
    ListedRun,
    LogLine,
    MetricPage,
    QuotaView,
    RunError,
    RunPage,
    RunView,
    SamplePage,
    Topology,
    ValidatedView,
    VersionView,
    WholeSample,
    WorkerView,
)
from services.controller.store.records import (
    Event,
    EventFilter,
    Note,
    RequestKey,
    Run,
    RunFilter,
    Submission,
)

_RECOVERABLE = frozenset(
    {"WorkerLost", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "DATABASE_UNAVAILABLE"}
)
_INFRA = _RECOVERABLE | {"CheckpointUnusable"}
_REFUSED = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION"})
_USER = _REFUSED | {"GenerationError", "SpecError", "QueueTimeout", "OtherCheckpoint"}
_KEYS = "|".join(re.escape(key) for key, _ in fields_of(RunSpec) if key.count(".") == 1)
# A worker that ended itself because of code of the user or the value of a key, not because another is slow.
_ENDED_BY_USER = re.compile(
    r"\S+ exited with exit code \d+[^:\n]*?"
    r"(?: while it ran '|:(?!\s*[\w.]*(?:Timeout|DeadlineExceeded)Error\b)"
    rf".*?(?<![\w./])(?:{_KEYS})(?![\w/]))"
)
# The message begins with the lost worker or with the called service.
_COMPONENT = re.compile(r"([a-z_]+-\d+)\b|/slipstream\.([a-z]+)\.v1\.")


def view_run(run: Run, activities: Sequence[str] = ()) -> RunView:
    return RunView(**_fields(run, activities), spec=json.loads(run.spec_json))


def view_listed(run: Run, activities: Sequence[str] = ()) -> ListedRun:
    return ListedRun(**_fields(run, activities))


def _fields(run: Run, activities: Sequence[str]) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in Run.__slots__},
        "id": run.run_id,
        "desired": desired_state(run.state),
        "activities": list(activities),
        "error": error_of(run),
    }


def view_quota(quota: Quota, *, event_streams: int) -> QuotaView:
    """Builds the view of a project's limits and use."""
    usage = {name: getattr(quota, name) for name in Quota.__slots__}
    return QuotaView(**usage, **asdict(quota.limits), event_streams=event_streams)


def error_of(run: Run) -> RunError | None:
    if run.state is not RunState.FAILED:
        return None
    category: Literal["USER", "SYSTEM", "INFRA"] = "SYSTEM"
    if run.state_reason in _USER or _ENDED_BY_USER.match(run.message):
        category = "USER"
    elif run.state_reason in _INFRA:
        category = "INFRA"
    return RunError(
        code=run.state_reason,
        category=category,
        recoverable=run.state_reason in _RECOVERABLE and category != "USER",
        message=run.message,
        component=_component_of(run),
        trace_id=tracing.of_step(run.run_id, run.step + 1).trace_id,
    )


def _component_of(run: Run) -> str:
    """Returns the part that failed: a worker, a service, or the controller if the message names no other."""
    if run.state_reason == "GenerationError":
        return "rollout"
    match = _COMPONENT.match(run.message)
    return match[1] or match[2] if match else "controller"


_MAC_BYTES = 12


class PageTokens:
    """Creates and reads page tokens; tokens of an earlier process are refused."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, position: str, scope: str) -> str:
        """Returns the token that continues after ``position`` in the list named ``scope``."""
        return base64.urlsafe_b64encode(self._mac(position, scope) + position.encode()).decode()

    def read(self, token: str, scope: str) -> str | None:
        """Returns the position of a token; None for the first page.

        Raises:
            InvalidArgumentError: If this object did not create the token for this list.
        """
        if not token:
            return None
        try:
            raw = base64.urlsafe_b64decode(token.encode())
            position = raw[_MAC_BYTES:].decode()
        except ValueError:
            raw, position = b"", ""
        if not hmac.compare_digest(raw[:_MAC_BYTES], self._mac(position, scope)):
            raise InvalidArgumentError(
                "page_token must be the next_page_token of the same list; start again without it"
            )
        return position

    def _mac(self, position: str, scope: str) -> bytes:
        text = f"{scope}\0{position}".encode()
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]


Items = AsyncIterator[Sequence[tuple[str, Event | LogLine | RunView | None]]]
"""Content of a stream: batches of items, each with the id from which the stream resumes after it.
The last item marks the end: the run, or None."""


class PreconditionRequiredError(FailedPreconditionError):
    """The request must name the revision that it changes."""

    reason = "PRECONDITION_REQUIRED"


@dataclass(slots=True)
class Call:
    """Request in progress: its caller and its run."""

    who: Principal
    _run: Run | None = None
    is_repeated: bool = False
    """True if the request created nothing: the response is that of an earlier request, or only a
    validation."""

    @property
    def run(self) -> Run:
        """Run as it was read at the start of the request; only for operations on one run."""
        assert self._run is not None
        return self._run

    def key(self, call: str, idempotency_key: str, body: str) -> RequestKey | None:
        """Returns the identity by which a repeated request is recognized; None without an idempotency key."""
        return RequestKey.of(f"{self.who.project}/{self.who.name} {call}", idempotency_key, body)


class Handlers:
    """Executes operations whose callers are already authorized."""

    def __init__(
        self,
        manager: RunManager,
        audit: RunAudit,
        logs: RunLogs,
        limits: RequestLimits,
        fleets: Fleets,
    ) -> None:
        self._manager = manager
        self._audit = audit
        self._logs = logs
        self._limits = limits
        self._fleets = fleets
        self._pages = PageTokens()

    async def create_run(self, call: Call, request: ops.CreateRun) -> RunView | ValidatedView:
        # Large or deeply nested specifications take long to parse; a thread keeps the event loop
        # free.
        document = await self._fleets.resolve(request.spec)
        spec = await asyncio.to_thread(parse_spec, document)
        if request.validate_only:
            await self._manager.validate(call.who.project, spec, role=call.who.role)
            call.is_repeated = True
            return ValidatedView(spec=spec.model_dump(mode="json"), spec_digest=spec_digest(spec))
        labels = dict(pair.split("=", 1) for pair in request.label)
        body = f"{canonical_json(spec)} {request.priority} {sorted(labels.items())}"
        submission = Submission(
            spec=spec,
            project=call.who.project,
            priority=request.priority,
            labels=labels,
            actor=call.who.name,
            request=call.key("CreateRun", request.idempotency_key, body),
        )
        run, is_new = await self._manager.create(submission, role=call.who.role)
        call.is_repeated = not is_new
        return self._view(run)

    async def list_runs(self, call: Call, request: ops.ListRuns) -> RunPage:
        key, _, value = request.label.partition("=")
        only = RunFilter(
            project=call.who.project,
            state=request.state,
            name=request.name or None,
            label=(key, value) if request.label else None,
            is_oldest_first=request.order_by == "create_time",
        )
        after = self._pages.read(request.page_token, repr(only))
        runs = await self._manager.list_runs(limit=request.page_size + 1, after=after, only=only)
        page = runs[: request.page_size]
        has_more = len(runs) > len(page)
        return RunPage(
            items=[view_listed(run, self._doing(run)) for run in page],
            next_page_token=self._pages.make(page[-1].run_id, repr(only)) if has_more else "",
        )

    async def get_run(self, call: Call, request: ops.GetRun) -> RunView:
        return self._view(call.run)

    async def get_defaults(self, call: Call, request: ops.GetDefaults) -> DefaultsView:
        # Each key that differs from its field's default costs a check of the specification.
        spec = await asyncio.to_thread(parse_spec, call.run.spec_json)
        return DefaultsView(items=await asyncio.to_thread(defaults_of, spec))

    async def update_run(self, call: Call, request: ops.UpdateRun) -> RunView:
        return self._view(
            await self._manager.patch(
                request.run_id,
                request,
                revision=revision_of(request.if_match),
                actor=call.who.name,
                role=call.who.role,
            )
        )

    async def delete_run(self, call: Call, request: ops.DeleteRun) -> None:
        await self._manager.delete(
            request.run_id,
            revision=revision_of(request.if_match),
            delete_checkpoints=request.delete_checkpoints,
        )
        await self._logs.delete(request.run_id)

    async def cancel_run(self, call: Call, request: ops.CancelRun) -> RunView:
        return self._view(await self._manager.cancel(request.run_id, request, actor=call.who.name))

    async def pause_run(self, call: Call, request: ops.PauseRun) -> RunView:
        return self._view(await self._manager.pause(request.run_id, request, actor=call.who.name))

    async def resume_run(self, call: Call, request: ops.ResumeRun) -> RunView:
        return self._view(await self._manager.resume(request.run_id, actor=call.who.name))

    async def evaluate_run(self, call: Call, request: ops.EvaluateRun) -> RunView:
        await self._manager.drivers.evaluate(call.run)
        return self._view(call.run)

    async def save_run(self, call: Call, request: ops.SaveRun) -> RunView:
        await self._manager.drivers.running(call.run).save()
        return self._view(call.run)

    async def report_tracker(self, call: Call, request: ops.ReportTracker) -> EventView:
        kind, text = "TrackerRecovered", f"{request.tracker} works again"
        if not request.is_writing:
            kind = "TrackerFailed"
            text = f"{request.tracker} failed and is retried; the run continues: {request.message}"
        note = Note(kind, text, {"tracker": request.tracker}, actor=call.who.name)
        return EventView.model_validate(await self._manager.add_event(call.run, note))

    async def fork_run(self, call: Call, request: ops.ForkRun) -> RunView:
        body = request.model_dump_json(exclude={"idempotency_key"})
        key = call.key("ForkRun", request.idempotency_key, body)
        overrides = await resolve_changes(self._fleets, request.overrides)
        fork = request.model_copy(update={"overrides": dict(overrides)})
        return self._view(
            await self._manager.fork(
                call.run, fork, actor=call.who.name, role=call.who.role, request=key
            )
        )

    async def list_events(self, call: Call, request: ops.ListEvents) -> EventPage:
        only = EventFilter(
            types=tuple(request.type),
            not_types=tuple(request.not_type),
            before_seq=request.before_seq or None,
            is_newest_first=request.order_by == "-seq",
        )
        events = await self._manager.feed.page(
            request.run_id, after_seq=request.after_seq, limit=request.limit, only=only
        )
        return EventPage(items=[EventView.model_validate(event) for event in events])

    async def watch_run(self, call: Call, request: ops.WatchRun) -> Items:
        last_id = request.last_event_id
        start = int(last_id) if last_id.isdecimal() and len(last_id) < 16 else request.after_seq
        if start:
            # Checked before the response begins, because a running stream can no longer report
            # expired events.
            await self._manager.feed.page(request.run_id, after_seq=start, limit=1)

        async def items() -> Items:
            async for events in self._manager.feed.watch(request.run_id, start):
                yield [(str(event.seq), event) for event in events]
            yield [("", self._view(await self._manager.get(request.run_id)))]

        return items()

    async def watch_runs(self, call: Call, request: ops.WatchRuns) -> Items:
        project, moment = call.who.project, _moment(request.last_event_id)
        if moment is not None:
            await self._manager.feed.check_moment(project, moment)

        async def items() -> Items:
            async for events in self._manager.feed.watch_project(project, moment):
                yield [(f"{event.time:.6f}", event) for event in events]

        return items()

    async def read_logs(
        self, call: Call, request: ops.ReadLogs
    ) -> AsyncIterator[Sequence[LogLine]]:
        return self._logs.tail(request.run_id, request.component, request.tail_lines)

    async def follow_logs(self, call: Call, request: ops.FollowLogs) -> Items:
        async def items() -> Items:
            cursor = ""
            async for lines in self._logs.follow(
                request.run_id, request.component, request.tail_lines, request.last_event_id
            ):
                yield lines
                cursor = lines[-1][0] if lines else cursor
            yield [(cursor, None)]

        return items()

    async def list_metrics(self, call: Call, request: ops.ListMetrics) -> MetricPage:
        return await self._audit.metrics(
            request.run_id,
            names=request.name,
            from_step=request.from_step,
            to_step=request.to_step,
            max_points=request.max_points,
        )

    async def list_groups(self, call: Call, request: ops.ListGroups) -> GroupPage:
        groups = await self._audit.groups(request.run_id, request.after_step, request.steps)
        return GroupPage(items=groups)

    async def list_samples(self, call: Call, request: ops.ListSamples) -> SamplePage:
        scope = request.model_dump_json(exclude={"page_token", "page_size", "excerpt"})
        records = await self._manager.samples.page(
            request.run_id,
            request,
            after=self._pages.read(request.page_token, scope) or "",
            limit=request.page_size + 1,
            excerpt=request.excerpt,
        )
        page = records[: request.page_size]
        has_more = len(records) > len(page)
        return SamplePage(
            items=page,
            next_page_token=self._pages.make(page[-1].id, scope) if has_more else "",
        )

    async def get_sample(self, call: Call, request: ops.GetSample) -> WholeSample:
        return await self._manager.samples.get(request.run_id, request.sample_id)

    async def export_samples(self, call: Call, request: ops.ExportSamples) -> AsyncIterator[bytes]:
        return await self._manager.samples.export(
            request.run_id, request, limit=request.limit, with_tokens=request.tokens
        )

    async def list_checkpoints(self, call: Call, request: ops.ListCheckpoints) -> CheckpointPage:
        rows = await self._audit.checkpoints(request.run_id)
        return CheckpointPage(items=[CheckpointView.model_validate(row) for row in rows])

    async def get_checkpoint(self, call: Call, request: ops.GetCheckpoint) -> CheckpointView:
        checkpoint = await self._audit.checkpoint(request.run_id, request.checkpoint_id)
        return CheckpointView.model_validate(checkpoint)

    async def delete_checkpoint(self, call: Call, request: ops.DeleteCheckpoint) -> None:
        await self._manager.checkpoints.delete(
            request.run_id, request.checkpoint_id, actor=call.who.name
        )

    async def get_topology(self, call: Call, request: ops.GetTopology) -> Topology:
        workers = self._manager.workers(request.run_id)
        return Topology(items=[WorkerView.model_validate(worker) for worker in workers])

    async def get_quota(self, call: Call, request: ops.GetQuota) -> QuotaView:
        project = call.who.project
        quota = await self._manager.quota(project)
        return view_quota(quota, event_streams=self._limits.num_streams(project))

    async def list_fleets(self, call: Call, request: ops.ListFleets) -> FleetPage:
        views = await self._fleets.views()
        return FleetPage(items=[await self._shown(view, call.who.project) for view in views])

    async def get_fleet(self, call: Call, request: ops.GetFleet) -> FleetView:
        return await self._shown(await self._fleets.view(request.name), call.who.project)

    async def _shown(self, fleet: FleetView, project: str) -> FleetView:
        """Returns a fleet without the ids of other projects' runs."""
        run_ids = {
            run_id
            for server in fleet.servers
            for run_id in (server.exclusive_run, *(run.run_id for run in server.runs))
        }
        visible_ids = {
            run_id: run_id if await self._is_of(run_id, project) else None for run_id in run_ids
        }
        servers = [
            server.model_copy(
                update={
                    "exclusive_run": visible_ids[server.exclusive_run],
                    "runs": [
                        run.model_copy(update={"run_id": visible_ids[run.run_id]})
                        for run in server.runs
                    ],
                }
            )
            for server in fleet.servers
        ]
        return fleet.model_copy(update={"servers": servers})

    async def _is_of(self, run_id: str | None, project: str) -> bool:
        try:
            return run_id is not None and (await self._manager.get(run_id)).project == project
        except NotFoundError:
            return False

    async def get_version(self, call: Call, request: ops.GetVersion) -> VersionView:
        return VersionView(version=version("slipstream"))

    def _view(self, run: Run) -> RunView:
        return view_run(run, self._doing(run))

    def _doing(self, run: Run) -> list[str]:
        return self._manager.drivers.activities(run.run_id)


def revision_of(if_match: str) -> int:
    """Returns the revision in an ``If-Match`` header, or -1 if it is not one of this API.

    Raises:
        PreconditionRequiredError: If the header is missing.
    """
    if not if_match:
        raise PreconditionRequiredError(
            "the header If-Match is missing; send the ETag of the run as you read it"
        )
    text = if_match.strip().removeprefix('"').removesuffix('"').partition("@")[0]
    # A foreign ETag becomes -1, which matches no revision.
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else -1


def _moment(last_event_id: str) -> float | None:
    """Returns the time after which a stream resumes, in seconds since the epoch; None means now."""
    try:
        moment = float(last_event_id)
    except ValueError:
        return None
    return moment if 0.0 < moment < 1e11 else None


def defaults_of(spec: RunSpec) -> dict[str, Any]:
    """Returns the value that each dotted key would have if the specification did not set it.

    Keys without which the specification is invalid are absent.
    """
    document = json.loads(canonical_json(spec))
    values = dict(flat(document))
    # The other keys have the default of their field, which depends on no other key.
    changed_keys = {key for key in _changed_fields(spec) if key in values}
    defaults = {key: value for key, value in values.items() if key not in changed_keys}
    for key in changed_keys:
        try:
            without = dict(flat(json.loads(canonical_json(parse_spec(_without(document, key))))))
        except SpecError:
            continue
        defaults[key] = without.get(key)
    return defaults


def _changed_fields(model: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys whose values differ from the defaults of their fields."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _changed_fields(value, f"{prefix}{name}.")
        elif info.is_required() or value != info.get_default(call_default_factory=True):
            yield from _keys(value, f"{prefix}{name}")


def _keys(value: object, key: str) -> Iterator[str]:
    """Yields the dotted keys of a value; those of a list are one."""
    if isinstance(value, BaseModel):
        yield from (f"{key}.{name}" for name, _ in flat(value.model_dump(mode="json")))
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys(inner, f"{key}.{name}")
    else:
        yield key


def _without(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns a copy of a document without one dotted key."""
    name, _, rest = key.partition(".")
    siblings = {sibling: value for sibling, value in document.items() if sibling != name}
    return {**siblings, name: _without(document[name], rest)} if rest else siblings
