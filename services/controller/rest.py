"""REST face of the run manager. Errors are RFC 9457 problems with a stable ``code``."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from services.common.errors import ServiceError
from services.common.spec.loader import SpecError, canonical_json, parse_spec
from services.controller.records import Event, RequestKey, Run, Submission
from services.controller.runs import RunManager

MAX_BODY_BYTES = 1 << 20

_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.UNPROCESSABLE_ENTITY,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "ALREADY_EXISTS": HTTPStatus.CONFLICT,
    "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
    "ABORTED": HTTPStatus.CONFLICT,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}


class RunView(BaseModel):
    """A run as clients see it."""

    id: str
    name: str
    state: str
    state_reason: str
    message: str
    step: int
    weight_version: int
    summary: dict[str, Any]
    spec: dict[str, Any]
    spec_digest: str
    create_time: datetime
    update_time: datetime
    revision: int


class RunPage(BaseModel):
    """A page of runs, newest first."""

    items: list[RunView]
    next_page_token: str


class EventView(BaseModel):
    """Something that happened to a run."""

    seq: int
    time: datetime
    type: str
    message: str
    data: dict[str, Any]
    actor: str


class EventPage(BaseModel):
    """Events of a run, in order."""

    items: list[EventView]


class WorkerView(BaseModel):
    """A worker of a run."""

    worker_id: str
    role: str
    state: str
    activity: str
    weight_version: int
    gauges: dict[str, float]


class Topology(BaseModel):
    """Registered workers of a run, by name."""

    items: list[WorkerView]


class VersionView(BaseModel):
    """The release that answers."""

    version: str


def build_app(manager: RunManager) -> FastAPI:
    """The application over a run manager."""
    app = FastAPI(
        title="Slipstream", version=version("slipstream"), docs_url="/docs", redoc_url=None
    )
    _add_error_handlers(app)
    _add_run_routes(app, manager)
    _add_event_routes(app, manager)

    @app.get("/v1/version")
    def get_version() -> VersionView:
        """The release that answers."""
        return VersionView(version=version("slipstream"))

    @app.get("/healthz", include_in_schema=False)
    def healthz() -> Response:
        """Whether the process lives."""
        return Response("ok\n", media_type="text/plain")

    return app


def _add_run_routes(app: FastAPI, manager: RunManager) -> None:
    @app.post("/v1/runs", status_code=HTTPStatus.CREATED)
    async def create_run(
        spec: dict[str, Any],
        response: Response,
        validate_only: bool = False,
        idempotency_key: Annotated[str, Header(max_length=64)] = "",
    ) -> RunView | dict[str, Any]:
        """Submit a run; the body is its specification. The run starts by itself."""
        parsed = parse_spec(spec)
        if validate_only:
            response.status_code = HTTPStatus.OK
            return {
                "spec": parsed.model_dump(mode="json"),
                "canonical_json": canonical_json(parsed),
            }
        key = RequestKey.of("POST /v1/runs", idempotency_key, canonical_json(parsed))
        run, is_new = await manager.create(Submission(spec=parsed, request=key))
        if not is_new:
            response.status_code = HTTPStatus.OK
        response.headers["Location"] = f"/v1/runs/{run.run_id}"
        return _view(run, response)

    @app.get("/v1/runs")
    async def list_runs(
        page_size: Annotated[int, Query(ge=1, le=500)] = 50, page_token: str = ""
    ) -> RunPage:
        """List runs, newest first."""
        runs = await manager.list_runs(limit=page_size + 1, before=page_token or None)
        page = runs[:page_size]
        more = len(runs) > page_size
        return RunPage(
            items=[_view(run) for run in page], next_page_token=page[-1].run_id if more else ""
        )

    @app.get("/v1/runs/{run_id}")
    async def get_run(run_id: str, response: Response) -> RunView:
        """One run."""
        return _view(await manager.get(run_id), response)

    @app.get("/v1/runs/{run_id}/topology")
    async def get_topology(run_id: str) -> Topology:
        """Registered workers of a run and what they are doing."""
        await manager.get(run_id)
        return Topology(
            items=[
                WorkerView(
                    worker_id=worker.worker_id,
                    role=worker.role,
                    state=worker.state,
                    activity=worker.activity,
                    weight_version=worker.weight_version,
                    gauges=worker.gauges,
                )
                for worker in manager.workers(run_id)
            ]
        )

    @app.post("/v1/runs/{run_id}/cancel")
    async def cancel_run(run_id: str, response: Response) -> RunView:
        """End a run. Cancelling a cancelled run changes nothing."""
        return _view(await manager.cancel(run_id), response)


def _add_event_routes(app: FastAPI, manager: RunManager) -> None:
    @app.get("/v1/runs/{run_id}/events")
    async def list_events(
        run_id: str,
        after_seq: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        type: str = "",
    ) -> EventPage:
        """Events of a run, in order."""
        await manager.get(run_id)
        events = await manager.feed.page(
            run_id, after_seq=after_seq, limit=limit, type_=type or None
        )
        return EventPage(items=[_event_view(event) for event in events])

    @app.get("/v1/runs/{run_id}/events/stream", response_class=EventSourceResponse)
    async def stream_events(
        run_id: str,
        after_seq: Annotated[int, Query(ge=0)] = 0,
        last_event_id: Annotated[str, Header()] = "",
    ) -> AsyncIterator[ServerSentEvent]:
        """Events of a run as they come; the stream ends with event ``end`` once the run has ended."""
        await manager.get(run_id)
        start = int(last_event_id) if last_event_id.isdecimal() else after_seq
        async for event in manager.feed.watch(run_id, start):
            yield ServerSentEvent(
                data=_event_view(event).model_dump(mode="json"), event=event.type, id=str(event.seq)
            )
        yield ServerSentEvent(
            data=_view(await manager.get(run_id)).model_dump(mode="json"), event="end"
        )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        status = _STATUS.get(error.code.name, HTTPStatus.INTERNAL_SERVER_ERROR)
        return _problem(request, status, error.reason.lower(), error.message)

    @app.exception_handler(SpecError)
    async def spec_error(request: Request, error: SpecError) -> JSONResponse:
        return _problem(
            request,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_spec",
            "the run specification has problems",
            errors=list(error.problems),
        )

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        return _problem(
            request,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_request",
            "the request has problems",
            errors=problems,
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        return _problem(
            request,
            status,
            status.phrase.lower().replace(" ", "_"),
            str(error.detail),
            error.headers,
        )

    @app.middleware("http")
    async def limit_body(request: Request, call_next: Any) -> Any:
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return _problem(
                request,
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "too_large",
                f"a body may have {MAX_BODY_BYTES} bytes",
            )
        return await call_next(request)


def _problem(
    request: Request,
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    errors: list[str] | None = None,
) -> JSONResponse:
    body: dict[str, Any] = {
        "type": f"/problems/{code}",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "instance": request.url.path,
        "code": code,
    }
    if errors is not None:
        body["errors"] = [{"message": message} for message in errors]
    return JSONResponse(
        body,
        status_code=status.value,
        headers=dict(headers or {}),
        media_type="application/problem+json",
    )


def _view(run: Run, response: Response | None = None) -> RunView:
    if response is not None:
        response.headers["ETag"] = f'"{run.revision}"'
    return RunView(
        id=run.run_id,
        name=run.name,
        state=run.state.value,
        state_reason=run.state_reason,
        message=run.message,
        step=run.step,
        weight_version=run.weight_version,
        summary=dict(run.summary),
        spec=parse_spec(run.spec_json).model_dump(mode="json"),
        spec_digest=run.spec_digest,
        create_time=datetime.fromtimestamp(run.create_time, UTC),
        update_time=datetime.fromtimestamp(run.update_time, UTC),
        revision=run.revision,
    )


def _event_view(event: Event) -> EventView:
    fields = asdict(event)
    fields["time"] = datetime.fromtimestamp(event.time, UTC)
    del fields["run_id"]
    return EventView(**fields)
