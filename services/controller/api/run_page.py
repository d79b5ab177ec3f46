"""Serves the run page and the API's documentation: static files that load nothing from other hosts."""

import secrets
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from services.common.errors import UnauthenticatedError
from services.controller.api.principals import Principal, TokenStore
from services.controller.api.rest import authenticate_request
from services.controller.api.run_api import RunApi
from services.controller.schemas import Role

_FILES = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
_CHUNK_BYTES = 16 << 10
_CODE_LIFE_S = 3600.0
_TOKEN_LIFE_S = 12 * 3600.0
# Max unused links of a user; a further one invalidates the oldest.
_MAX_LINKS = 20


class PageLink(BaseModel):
    """One-time link that signs a browser in."""

    path: str


class SignIn(BaseModel):
    """Code from a sign-in link."""

    code: str


class SignedIn(BaseModel):
    """Token that authenticates the browser from now on."""

    token: str


class WhoAmI(BaseModel):
    """Identity and role of the caller."""

    name: str
    project: str
    role: Role


class PageLinks:
    """One-time links that give a browser its own token. Belongs to the event loop's thread.

    Args:
        check_valid: Raises if a principal is no longer known.
    """

    def __init__(
        self,
        tokens: TokenStore,
        check_valid: Callable[[Principal], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._check_valid = check_valid
        self._clock = clock
        self._codes: dict[str, tuple[Principal, float]] = {}

    def make(self, who: Principal) -> PageLink:
        """Creates a link that signs a browser in as ``who`` within the hour."""
        now = self._clock()
        self._codes = {code: entry for code, entry in self._codes.items() if entry[1] > now}
        user = who.project, who.name
        codes = [code for code, (by, _) in self._codes.items() if (by.project, by.name) == user]
        for oldest in codes[: max(len(codes) - _MAX_LINKS + 1, 0)]:
            del self._codes[oldest]
        code = secrets.token_urlsafe(24)
        self._codes[code] = (who, now + _CODE_LIFE_S)
        return PageLink(path=f"/page/#code={code}")

    async def sign_in(self, code: str) -> SignedIn:
        """Returns a token for a link's code and uses the link up.

        Raises:
            UnauthenticatedError: If the link was used before or is too old, or its creator is no
                longer known.
        """
        who, deadline = self._codes.pop(code, (None, 0.0))
        if who is None or deadline < self._clock():
            raise UnauthenticatedError(
                "this link was used before or has expired; 'slipstream page' prints a new one"
            )
        await self._check_valid(who)
        return SignedIn(token=await run_in_threadpool(self._tokens.derive, who, _TOKEN_LIFE_S))


def add_page_links(app: FastAPI, api: RunApi, links: PageLinks) -> None:
    """Adds the routes that create and redeem links; call it before the page's files are mounted."""

    @app.post("/page/links", status_code=HTTPStatus.CREATED, include_in_schema=False)
    async def make_link(request: Request) -> PageLink:
        return links.make(await authenticate_request(api, request))

    @app.get("/page/who", include_in_schema=False)
    async def who_am_i(request: Request) -> WhoAmI:
        """Returns the caller's identity, so that the page offers only what the role allows."""
        who = await authenticate_request(api, request)
        return WhoAmI(name=who.name, project=who.project, role=who.role)

    @app.post("/page/sign-in", include_in_schema=False)
    async def sign_in(body: SignIn) -> SignedIn:
        """Exchanges the code of a link for a token."""
        return await links.sign_in(body.code)


def with_run_page(app: FastAPI) -> FastAPI:
    """Adds the run page and ``/docs`` to the application.

    ``/`` redirects to ``/page/``, which shows the active runs; ``/runs/RUN`` shows one run, and
    ``/runs/RUN/TAB`` one tab of it.
    """

    @app.get("/", include_in_schema=False)
    def to_page() -> RedirectResponse:
        """Redirects the bare address to the page."""
        return RedirectResponse("page/")

    @app.get("/runs/{run_id}", include_in_schema=False)
    @app.get("/runs/{run_id}/{tab}", include_in_schema=False)
    def run_page() -> Response:
        """Returns the page; it reads from its own URL what to show."""
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        """Returns the API's documentation for people."""
        return FileResponse(_FILES / "docs.html", headers=_HEADERS)

    app.mount("/page", _Page(directory=_FILES, html=True), name="page")
    # Swagger UI comes from a package, so that the page needs no network.
    app.mount("/docs", _Page(packages=[("fastapi_offline", "static")]), name="docs")
    return app


class _Page(StaticFiles):
    """Static files with headers that forbid content from other hosts."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Returns a file with the security headers."""
        response = await super().get_response(path, scope)
        if isinstance(response, FileResponse):
            # The server buffers one chunk for each client that does not read.
            response.chunk_size = _CHUNK_BYTES
        response.headers.update(_HEADERS)
        return response
