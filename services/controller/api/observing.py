"""REST routes that only look: events, logs, numbers, samples, checkpoints, workers, quota."""

from importlib.metadata import version
from typing import Annotated

from fastapi import Depends, FastAPI, Query
from fastapi.responses import StreamingResponse

from services.controller.api.actions import CheckpointId
from services.controller.api.commands import Access, Authenticate, RunId
from services.controller.api.models import (
    CheckpointPage,
    CheckpointView,
    EventPage,
    MetricPage,
    QuotaView,
    SamplePage,
    Topology,
    VersionView,
)
from services.controller.api.principals import Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.api.views import view_checkpoint, view_event, view_quota, view_worker
from services.controller.audit import RunAudit
from services.controller.logs import RunLogs
from services.controller.runs import RunManager

MAX_SEQ = 2**53


def add_observe_routes(
    app: FastAPI,
    manager: RunManager,
    audit: RunAudit,
    logs: RunLogs,
    authenticate: Authenticate,
    limits: RequestLimits,
) -> None:
    """Add the routes."""
    access = Access(manager)
    _add_events(app, manager, access, authenticate)
    _add_records(app, audit, access, authenticate)
    _add_logs(app, logs, access, authenticate)
    _add_facts(app, manager, access, authenticate, limits)


def _add_events(
    app: FastAPI, manager: RunManager, access: Access, authenticate: Authenticate
) -> None:
    @app.get("/v1/runs/{run_id}/events")
    async def list_events(
        run_id: RunId,
        who: Annotated[Principal, Depends(authenticate)],
        after_seq: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        type: Annotated[str, Query(max_length=32)] = "",
    ) -> EventPage:
        """Events of a run, in order."""
        await access.run(who, run_id)
        events = await manager.feed.page(
            run_id, after_seq=after_seq, limit=limit, type_=type or None
        )
        return EventPage(items=[view_event(event) for event in events])


def _add_records(app: FastAPI, audit: RunAudit, access: Access, authenticate: Authenticate) -> None:
    @app.get("/v1/runs/{run_id}/metrics")
    async def list_metrics(
        run_id: RunId,
        who: Annotated[Principal, Depends(authenticate)],
        name: Annotated[str, Query(max_length=128)] = "",
        from_step: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
        max_points: Annotated[int, Query(ge=1, le=2000)] = 2000,
    ) -> MetricPage:
        """Numbers of the run's steps: all, or one by name; evenly thinned out to ``max_points``."""
        await access.run(who, run_id)
        return MetricPage(items=await audit.metrics(run_id, name, from_step, max_points))

    @app.get("/v1/runs/{run_id}/samples")
    async def list_samples(
        run_id: RunId,
        who: Annotated[Principal, Depends(authenticate)],
        after_step: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
        steps: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> SamplePage:
        """Groups that steps trained, those in flight, and those that were given up, with the reason."""
        await access.run(who, run_id)
        return SamplePage(items=await audit.samples(run_id, after_step, steps))

    @app.get("/v1/runs/{run_id}/checkpoints")
    async def list_checkpoints(
        run_id: RunId, who: Annotated[Principal, Depends(authenticate)]
    ) -> CheckpointPage:
        """Checkpoints of a run, newest first."""
        await access.run(who, run_id)
        return CheckpointPage(
            items=[view_checkpoint(found) for found in await audit.checkpoints(run_id)]
        )

    @app.get("/v1/runs/{run_id}/checkpoints/{checkpoint_id}")
    async def get_checkpoint(
        run_id: RunId, checkpoint_id: CheckpointId, who: Annotated[Principal, Depends(authenticate)]
    ) -> CheckpointView:
        """One checkpoint."""
        await access.run(who, run_id)
        return view_checkpoint(await audit.checkpoint(run_id, checkpoint_id))


def _add_logs(app: FastAPI, logs: RunLogs, access: Access, authenticate: Authenticate) -> None:
    @app.get(
        "/v1/runs/{run_id}/logs",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-ndjson": {}}}},
    )
    async def read_logs(
        run_id: RunId,
        who: Annotated[Principal, Depends(authenticate)],
        component: Annotated[str, Query(pattern="^[a-z0-9-]{0,63}$")] = "",
        tail_lines: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> StreamingResponse:
        """The ends of the workers' logs, one JSON object a line: ``component`` and ``line``."""
        await access.run(who, run_id)
        tail = await logs.tail(run_id, component, tail_lines)
        lines = [line.model_dump_json() + "\n" for line in tail]
        return StreamingResponse(iter(lines), media_type="application/x-ndjson")


def _add_facts(
    app: FastAPI,
    manager: RunManager,
    access: Access,
    authenticate: Authenticate,
    limits: RequestLimits,
) -> None:
    @app.get("/v1/runs/{run_id}/topology")
    async def get_topology(
        run_id: RunId, who: Annotated[Principal, Depends(authenticate)]
    ) -> Topology:
        """Registered workers of a run and what they are doing."""
        await access.run(who, run_id)
        return Topology(items=[view_worker(worker) for worker in manager.workers(run_id)])

    @app.get("/v1/quota")
    async def get_quota(who: Annotated[Principal, Depends(authenticate)]) -> QuotaView:
        """What the project may use, and uses."""
        quota = await manager.quota(who.project)
        return view_quota(quota, event_streams=limits.num_streams(who.project))

    @app.get("/v1/version")
    async def get_version(who: Annotated[Principal, Depends(authenticate)]) -> VersionView:
        """The release that answers."""
        return VersionView(version=version("slipstream"))
