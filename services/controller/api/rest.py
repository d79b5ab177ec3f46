"""REST routes of the run API, one for each operation."""

import functools
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from starlette.routing import BaseRoute

from services.common.errors import InvalidArgumentError, ResourceExhaustedError
from services.common.http.limits import admit
from services.controller.api.errors import BodyError
from services.controller.api.handlers import Items
from services.controller.api.operations import OPERATIONS, Operation, Place
from services.controller.api.principals import Principal
from services.controller.api.request_limits import peer_of
from services.controller.api.run_api import RunApi, handler_name
from services.controller.schemas import EventView, LogLine, RunView
from services.controller.store.records import Event

# Below the minute after which proxies close a silent connection.
_PING_S = 10.0
_PING = b": nothing new\n\n"

_TEXTS = {name: {"type": "string"} for name in ("data", "event", "id")}
DESCRIPTION: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"itemSchema": {"type": "object", "properties": _TEXTS}}}
    }
}
"""OpenAPI description of a route that answers with a stream of events."""

LINES = "application/x-ndjson"
_MAX_CACHED_FRAMES = 2000
_PARAMETERS: dict[Place, Any] = {"path": Path, "query": Query, "header": Header}
_EXTRA_RESPONSES: dict[str, dict[int | str, dict[str, Any]]] = {
    "create_run": {
        200: {
            "description": "The run of an earlier request with the same key, or the validated specification."
        }
    },
    "get_run": {304: {"description": "The run has not changed."}},
}


def event_stream(frames: AsyncIterator[bytes]) -> StreamingResponse:
    """Returns a response that streams server-sent events, and a comment as a ping while there are none.

    It ends with the event ``overflow`` if the reader is too slow.

    Args:
        frames: Results of :func:`frame_of`, one or several per item; an item of no bytes has no event.
    """
    # Without these headers, proxies such as nginx would buffer events.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_pings(frames), media_type="text/event-stream", headers=headers)


def frame_of(type_: str, data: str, id_: str = "") -> bytes:
    """Formats a server-sent event; ``data`` is JSON on one line."""
    head = f"id: {id_}\n" if id_ else ""
    return f"{head}event: {type_}\ndata: {data}\n\n".encode()


async def _with_pings(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    sent_at = time.monotonic()
    try:
        async for frame in frames:
            if frame or time.monotonic() - sent_at > _PING_S:
                yield frame or _PING
                sent_at = time.monotonic()
    except ResourceExhaustedError as error:
        yield frame_of("overflow", json.dumps({"detail": error.message}))


async def authenticate_request(api: RunApi, request: Request) -> Principal:
    """Returns the principal of a request; exempts its connection from the limit on unauthenticated ones.

    Raises:
        UnauthenticatedError: If the token is not known.
        RateLimitedError: As :meth:`RunApi.authenticate`.
    """
    who = await api.authenticate(request.headers.get("authorization", ""), peer_of(request))
    admit(request.scope)
    return who


def add_routes(app: FastAPI, api: RunApi) -> None:
    app.state.api, app.state.encoded = api, _Encoded()
    app.router.routes.extend(_routes(tuple(OPERATIONS)))


async def _authenticated(request: Request) -> Principal:
    who: Principal = request.state.who
    return who


async def _streaming(
    request: Request, who: Annotated[Principal, Depends(_authenticated)]
) -> AsyncIterator[Principal]:
    # FastAPI leaves this block when the stream has ended.
    with request.app.state.api.limits.stream(who.project):
        yield who


class _AuthenticateFirst(APIRoute):
    """Route that reads the body of a request only after its caller is authenticated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_authenticated(request: Request) -> Response:
            request.state.who = await authenticate_request(request.app.state.api, request)
            return await answer(request)

        return answer_authenticated


@functools.cache
def _routes(operations: tuple[type[Operation[Any]], ...]) -> list[BaseRoute]:
    """Builds the routes of all operations, which takes most of the time of building an application."""
    router = APIRouter()
    for operation in operations:
        method, path = operation.http.split(" ")
        further: dict[str, Any] = {"response_model": operation.answer()}
        if operation.form != "json":
            further = {"response_model": None, "response_class": StreamingResponse}
        name = handler_name(operation)
        is_stream = operation.form == "events"
        endpoint = _endpoint(operation)
        endpoint.__name__ = name
        endpoint.__signature__ = _signature(  # type: ignore[attr-defined]
            operation, Depends(_streaming if is_stream else _authenticated)
        )
        router.add_api_route(
            path,
            endpoint,
            route_class_override=_AuthenticateFirst,
            methods=[method],
            status_code=operation.status,
            description=inspect.getdoc(operation),
            responses=DESCRIPTION if is_stream else _extra_responses(operation, name),
            **further,
        )
    return router.routes


def _extra_responses(operation: type[Operation[Any]], name: str) -> dict[int | str, dict[str, Any]]:
    """Returns the responses of an operation that FastAPI cannot derive."""
    if operation.form != "lines":
        return _EXTRA_RESPONSES.get(name, {})
    item = {"$ref": f"#/components/schemas/{operation.answer().__name__}"}
    return {200: {"content": {LINES: {"itemSchema": item}}}}


def _endpoint(operation: type[Operation[Any]]) -> Callable[..., Awaitable[Any]]:
    async def endpoint(request: Request, response: Response, who: Principal, **values: Any) -> Any:
        fields = await _fields(operation, request, values)
        try:
            parsed = operation.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        answer, call = await request.app.state.api.answer(who, parsed)
        if operation.form == "events":
            return event_stream(request.app.state.encoded.frames(answer))
        if operation.form == "lines":
            return StreamingResponse(_lines(answer), media_type=LINES)
        if call.is_repeated:
            response.status_code = HTTPStatus.OK
        if isinstance(answer, RunView):
            # ``If-Match`` compares only the revision; the time also changes with the run's progress.
            response.headers["ETag"] = f'"{answer.revision}@{answer.update_time.isoformat()}"'
            if operation.location:
                response.headers["Location"] = operation.location.format(id=answer.id)
            if values.get("if_none_match") == response.headers["ETag"]:
                return Response(status_code=HTTPStatus.NOT_MODIFIED)
        return answer

    return endpoint


async def _lines(batches: AsyncIterator[bytes | Sequence[BaseModel]]) -> AsyncIterator[bytes]:
    async for batch in batches:
        if isinstance(batch, bytes):
            yield batch
        else:
            yield b"".join(line.model_dump_json().encode() + b"\n" for line in batch)


async def _fields(
    operation: type[Operation[Any]], request: Request, values: dict[str, Any]
) -> dict[str, Any]:
    """Collects the fields of an operation from path, query, headers and body."""
    body = values.pop("body", None)
    fields = values if body is None else values | body.model_dump(exclude_unset=True)
    for name in operation.model_fields:
        if operation.place(name) == "document":
            fields[name] = await _document(request)
    return fields


async def _document(request: Request) -> dict[str, Any]:
    """Reads the body of a request.

    Raises:
        BodyError: If it is not JSON, or nested too deeply to parse.
        InvalidArgumentError: If it is not an object.
    """
    try:
        document = await request.json()
    except (ValueError, RecursionError) as error:
        raise BodyError(str(error)) from error
    if not isinstance(document, dict):
        raise InvalidArgumentError(
            "the request body must be a JSON object with the run's specification"
        )
    return document


def _signature(operation: type[Operation[Any]], who: Any) -> inspect.Signature:
    """Returns the signature through which FastAPI reads the operation's fields."""
    types: dict[str, Any] = {
        "request": Request,
        "response": Response,
        "who": Annotated[Principal, who],
    }
    defaults: dict[str, Any] = {}
    for name, field in operation.model_fields.items():
        if (location := operation.place(name)) in _PARAMETERS:
            types[name] = _annotation(field, _PARAMETERS[location])
            if not field.is_required():
                defaults[name] = field.default
    if (body := operation.body()) is not None:
        types["body"] = body
        needs = any(field.is_required() for field in body.model_fields.values())
        if operation.http.startswith("POST") and not needs:
            types["body"], defaults["body"] = body | None, None
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=kind,
                default=defaults.get(name, inspect.Parameter.empty),
            )
            for name, kind in types.items()
        ]
    )


def _annotation(field: FieldInfo, kind: Any) -> Any:
    bounds = [item for item in field.metadata if not isinstance(item, str)]
    return Annotated[(field.annotation, *bounds, kind(json_schema_extra=field.json_schema_extra))]


class _Encoded:
    """Cache of the newest encoded events, so that many readers share one encoding."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int], bytes] = {}

    async def frames(self, items: Items) -> AsyncIterator[bytes]:
        async for batch in items:
            yield b"".join(self._frame(id_, item) for id_, item in batch)
            if batch and not isinstance(batch[0][1], Event):
                yield b""

    def _frame(self, id_: str, item: Event | LogLine | RunView | None) -> bytes:
        if isinstance(item, Event):
            return b"id: %b\n%b" % (id_.encode(), self._event(item))
        if isinstance(item, LogLine):
            return frame_of("line", item.model_dump_json(), id_)
        return frame_of("end", item.model_dump_json() if item else "{}", id_)

    def _event(self, event: Event) -> bytes:
        key = (event.run_id, event.seq)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MAX_CACHED_FRAMES:
                del self._frames[next(iter(self._frames))]
            view = EventView.model_validate(event)
            frame = self._frames[key] = frame_of(event.type, view.model_dump_json())
        return frame
