"""REST application: routes, errors and the OpenAPI document."""

import time
from collections.abc import Collection
from http import HTTPStatus
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.runspec.run import RunSpec
from services.controller import metrics
from services.controller.api.errors import PROBLEM_TYPE, Problem, add_error_handlers, problem
from services.controller.api.rest import add_routes
from services.controller.api.run_api import RunApi
from services.controller.metrics import HTTP_SECONDS
from services.controller.schemas import LogLine
from services.controller.settings import LOOPBACK


class SameOrigin:
    """Admits requests from this server's own pages and from programs other than browsers.

    A page of another origin can send requests to this server, also under a name that it makes resolve
    to this host (DNS rebinding), but it cannot set the headers that reveal this: ``Host`` and ``Origin``.

    Args:
        hosts: Names under which this server is reached; empty allows any, for servers with a gateway.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves or refuses a request."""
        if scope["type"] == "http":
            request = Request(scope)
            if (refusal := self._refusal(request)) is not None:
                status, code, detail = refusal
                metrics.API_REFUSALS.labels(code).inc()
                await problem(request, status, code, detail)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[HTTPStatus, str, str] | None:
        host = request.headers.get("host", "")
        if self._hosts and _name(host) not in self._hosts:
            return (
                HTTPStatus.MISDIRECTED_REQUEST,
                "foreign_host",
                f"the host must be one of {', '.join(sorted(self._hosts))}, got {host!r}",
            )
        origin = request.headers.get("origin")
        if origin is not None:
            origin_host = urlsplit(origin).netloc
            if origin_host != host and _name(origin_host) not in self._hosts - set(LOOPBACK):
                return (
                    HTTPStatus.FORBIDDEN,
                    "foreign_origin",
                    f"pages of origin {origin!r} must not use this API",
                )
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if _has_body(request) and media_type != "application/json":
            return (
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "not_json",
                "the request body must be JSON; send Content-Type: application/json",
            )
        return None


def _name(host: str) -> str:
    """Returns a host without its port."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()


def _has_body(request: Request) -> bool:
    length = request.headers.get("content-length", "0")
    return length != "0" or "transfer-encoding" in request.headers


_REFUSALS = {
    "400": "The body is not JSON.",
    "401": "The token is missing, unknown or expired.",
    "403": "The caller's role does not permit the operation.",
    "404": "The project has no such resource.",
    "408": "The body did not arrive in time.",
    "409": "The state of the resource does not permit the operation.",
    "410": "Events after the cursor are no longer stored.",
    "412": "The run has changed since the caller read it.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "422": "The request is invalid.",
    "428": "The header If-Match is missing.",
    "429": "A quota or rate limit is exceeded.",
    "503": "Temporarily unavailable; try again.",
}


class Measured:
    """ASGI middleware that records the time until each response begins.

    The end is not measured, because streams last as long as their readers.

    Args:
        app: Application to measure; its router stores the matched route in the scope.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                _record(scope, message["status"], time.perf_counter() - begin)
            await send(message)

        await self._app(scope, receive, observe)


def _record(scope: Scope, status: int, seconds: float) -> None:
    """Records a response; skips requests without a route, because callers can invent paths and methods."""
    route = scope.get("route")
    if route is not None and status != 405:
        HTTP_SECONDS.labels(route.path, scope["method"], str(status)).observe(seconds)


def build_app(api: RunApi, *, hosts: Collection[str] = ()) -> FastAPI:
    """Builds the REST application.

    Args:
        hosts: Host names under which browsers reach it; empty allows any.
    """
    app = FastAPI(
        title="Slipstream",
        version=version("slipstream"),
        summary="Asynchronous reinforcement learning for language models.",
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)
    app.add_middleware(SameOrigin, hosts=hosts)
    add_routes(app, api)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]

    @app.get("/healthz", include_in_schema=False)
    def healthz() -> Response:
        """Answers liveness probes."""
        return Response("ok\n", media_type="text/plain")

    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Builds the OpenAPI document.

    Adds what FastAPI does not know: the run specification, problems and log lines.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        schemas = document["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for model in (Problem, RunSpec, LogLine):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                _describe(operation)
        reference = {"schema": {"$ref": "#/components/schemas/RunSpec"}}
        document["paths"]["/v1/runs"]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": reference},
        }
        app.openapi_schema = document
    return app.openapi_schema


def _describe(operation: dict[str, Any]) -> None:
    reference = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for status, meaning in _REFUSALS.items():
        operation["responses"][status] = {
            "description": meaning,
            "content": {PROBLEM_TYPE: reference},
        }
    for parameter in operation.get("parameters", ()):
        # The controller answers 428 without this header; FastAPI would answer 422 if it were
        # declared required.
        if parameter["name"] == "if-match":
            parameter["required"] = True
            parameter["schema"].pop("default", None)
