"""Errors of the REST API as RFC 9457 problems with a stable ``code``."""

import asyncio
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import InvalidArgumentError, ResourceExhaustedError, ServiceError
from services.common.runspec.loader import MAX_DOCUMENT_BYTES, SpecError
from services.common.telemetry import tracing
from services.common.telemetry.logging import RareLog

logger = logging.getLogger(__name__)

_BODY_DEADLINE_S = 30.0
_MAX_UNAUTHENTICATED_BYTES = 4 << 10
"""Max size of the body of a request without a known token, such as a sign-in."""
PROBLEM_TYPE = "application/problem+json"

_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.UNPROCESSABLE_ENTITY,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "ALREADY_EXISTS": HTTPStatus.CONFLICT,
    "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
    "ABORTED": HTTPStatus.PRECONDITION_FAILED,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
}

# Statuses that are logged because the requests may be an attack.
_LOGGED = frozenset(map(HTTPStatus, (401, 403, 408, 413, 415, 421, 429)))
_refusals = RareLog(logger)

_STATUS_OF_REASON = {
    "PRECONDITION_REQUIRED": HTTPStatus.PRECONDITION_REQUIRED,
    "CURSOR_EXPIRED": HTTPStatus.GONE,
}


class BodyError(ValueError):
    """The body of a request is not JSON; any other invalid JSON is a fault of the controller."""


class FieldProblem(BaseModel):
    """Problem of one part of a request."""

    pointer: str
    """JSON pointer to the part; empty for the whole request."""
    message: str


class Problem(BaseModel):
    """Reason for which a request was refused (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    """Stable code for programs."""
    errors: list[FieldProblem] = []
    trace_id: str
    """Trace id that the request brought, or a new one; appears in the controller's log lines."""
    retry_after_seconds: float | None = None


def add_error_handlers(app: FastAPI) -> None:
    """Makes the application answer every error with a problem document."""
    _add_domain_handlers(app)
    _add_request_handlers(app)
    app.add_middleware(_BodyLimit)


def _add_domain_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        status = _STATUS.get(error.code.name, HTTPStatus.INTERNAL_SERVER_ERROR)
        status = _STATUS_OF_REASON.get(error.reason, status)
        is_internal = status is HTTPStatus.INTERNAL_SERVER_ERROR
        detail = "the controller failed; see its log" if is_internal else error.message
        headers: dict[str, str] = {}
        retry: float | None = None
        if isinstance(error, ResourceExhaustedError):
            retry = error.retry_after_s
            headers["Retry-After"] = str(max(1, round(retry)))
        if status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return problem(
            request,
            status,
            error.reason.lower(),
            detail,
            headers=headers,
            retry_after_s=retry,
            fault=error if is_internal else None,
        )

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        detail = "the controller failed; see its log"
        return problem(request, status, "internal", detail, fault=error)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        # Without this handler, the disconnection would be logged as a fault of the controller.
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    @app.exception_handler(SpecError)
    async def spec_error(request: Request, error: SpecError) -> JSONResponse:
        return problem(
            request,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            InvalidSpecError.reason.lower(),
            "the run specification is invalid",
            errors=[FieldProblem(pointer=_pointer(text), message=text) for text in error.problems],
        )


class InvalidSpecError(InvalidArgumentError):
    """A run specification breaks a rule."""

    reason = "INVALID_SPEC"


class InvalidRequestError(InvalidArgumentError):
    """A field of a request is unknown, or has a wrong value."""

    reason = "INVALID_REQUEST"


def describe_field_error(error: Mapping[str, Any]) -> str:
    """Returns the message for one field error of pydantic, with the given value if there is one."""
    if error["type"] == "extra_forbidden":
        return "is not a field of this request; docs/openapi.json lists the fields"
    shows = error["type"] not in ("missing", "json_invalid")
    return f"{error['msg']}, got {error['input']!r:.80}" if shows else str(error["msg"])


def _pointer(problem: str) -> str:
    """Returns the key at the start of a problem's message as a JSON pointer; empty if it names none."""
    key = re.match(r"[\w-]+(\.[\w-]+)+|\w+(?=: )", problem)
    return "/" + key[0].replace(".", "/") if key else ""


def _add_request_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [
            FieldProblem(
                pointer="/" + "/".join(str(step) for step in item["loc"]),
                message=describe_field_error(item),
            )
            for item in error.errors()
        ]
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        code = InvalidRequestError.reason.lower()
        return problem(request, status, code, "the request is invalid", errors=errors)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        headers = dict(error.headers or {})
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_allowed_methods(app, request))
        code, detail = status.phrase.lower().replace(" ", "_"), str(error.detail)
        if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            code = "too_large"
        return problem(request, status, code, detail, headers=headers)

    @app.exception_handler(BodyError)
    async def body_error(request: Request, error: BodyError) -> JSONResponse:
        return problem(
            request,
            HTTPStatus.BAD_REQUEST,
            "invalid_json",
            f"the request body must be JSON: {error}",
        )


class _BodyLimit:
    """ASGI middleware that refuses request bodies that are too large or too slow.

    A body whose stated size is too large is refused before it is read. Responses pass through without a copy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on; reading its body raises HTTPException: 413 if too large, 408 if too slow."""
        num_bytes, is_whole = 0, False
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        stated = int(length) if length.isdecimal() else 0
        deadline = asyncio.get_running_loop().time() + _BODY_DEADLINE_S

        async def receive_some() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                # After the body, this waits until the client disconnects, which ends a stream.
                return await receive()
            # Authentication stores the principal before it reads the body.
            is_authenticated = "who" in scope.get("state", ())
            max_bytes = MAX_DOCUMENT_BYTES if is_authenticated else _MAX_UNAUTHENTICATED_BYTES
            if stated > max_bytes:
                raise _too_large(max_bytes)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT) from error
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            return message

        await self._app(scope, receive_some, send)


def _too_large(max_bytes: int) -> HTTPException:
    detail = f"the request body must have at most {max_bytes} bytes"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)


def problem(
    request: Request,
    status: HTTPStatus,
    code: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    errors: list[FieldProblem] | None = None,
    retry_after_s: float | None = None,
    fault: Exception | None = None,
) -> JSONResponse:
    """Returns the response that describes a problem; logs faults of the controller."""
    trace = tracing.parse(request.headers.get("traceparent", "")) or tracing.uncollected_trace()
    if status in _LOGGED:
        peer = request.client.host if request.client else ""
        _refusals.warning(f"request refused: {code}", path=request.url.path, peer=peer)
    if fault is not None:
        with tracing.within(trace):
            logger.error("request failed", exc_info=fault, extra={"path": request.url.path})
    body = Problem(
        type=f"/problems/{code}",
        title=status.phrase,
        status=status.value,
        detail=detail,
        instance=request.url.path,
        code=code,
        errors=errors or [],
        trace_id=trace.trace_id,
        retry_after_seconds=retry_after_s,
    )
    return JSONResponse(
        body.model_dump(mode="json", exclude_none=True),
        status_code=status.value,
        headers=dict(headers or {}),
        media_type=PROBLEM_TYPE,
    )


def _allowed_methods(app: FastAPI, request: Request) -> list[str]:
    """Returns the methods of all routes of a path, because each route knows only its own."""
    methods: set[str] = set()
    for route in app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)
