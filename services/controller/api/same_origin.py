"""ASGI middleware that refuses requests sent by other web pages.

It checks the name of this host, the origin and the type of the body.
"""

from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.controller import metrics
from services.controller.api.errors import problem
from services.controller.settings import LOOPBACK


class SameOrigin:
    """Admits requests from this server's own pages and from programs other than browsers.

    A page of another origin can send requests and have its name resolve to this host (DNS
    rebinding), but it cannot choose the headers that reveal this.

    Args:
        app: Application that receives the requests.
        hosts: Names under which this server is reached; empty allows any, as behind a gateway.
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
            there = urlsplit(origin).netloc
            if there != host and _name(there) not in self._hosts - set(LOOPBACK):
                return (
                    HTTPStatus.FORBIDDEN,
                    "foreign_origin",
                    f"pages of origin {origin!r} must not use this API",
                )
        if _has_body(request) and _media_type(request) != "application/json":
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


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
