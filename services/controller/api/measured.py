"""How long the API takes to answer, by route."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.metrics import HTTP_SECONDS


class Measured:
    """Records how long an application takes to begin each answer; streams last while they are watched.

    Args:
        app: Answers; its router leaves the route that it chose in the scope.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
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
    """What no route takes is not recorded: anybody can make up paths and methods."""
    route = scope.get("route")
    if route is not None and status != 405:
        HTTP_SECONDS.labels(route.path, scope["method"], str(status)).observe(seconds)
