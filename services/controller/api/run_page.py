"""Serves the run page and the API's description: static files that load nothing from elsewhere."""

import secrets
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from services.common.errors import UnauthenticatedError
from services.controller.api.auth_rate_limit import peer_of
from services.controller.api.principals import Principal, TokenStore
from services.controller.api.run_api import RunApi
from services.controller.models import Role

_FILES = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
_CHUNK_BYTES = 16 << 10
_CODE_LIFE_S = 3600.0
_TOKEN_LIFE_S = 12 * 3600.0


class PageLink(BaseModel):
    """A link that signs one browser in, once."""

    path: str


class SignIn(BaseModel):
    """The code of a link."""

    code: str


class SignedIn(BaseModel):
    """What the browser is known by from now on."""

    token: str


class WhoAmI(BaseModel):
    """Whom the API takes the caller for."""

    name: str
    project: str
    role: Role


class PageLinks:
    """Links by which a browser gets a token of its own. Belongs to the event loop's thread.

    Args:
        tokens: Where those tokens are kept.
        recognize: Raises if a principal is not known any more.
        clock: Seconds.
    """

    def __init__(
        self,
        tokens: TokenStore,
        recognize: Callable[[Principal], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._recognize = recognize
        self._clock = clock
        self._codes: dict[str, tuple[Principal, float]] = {}

    def make(self, who: Principal) -> PageLink:
        """A link that signs a browser in as ``who`` within the hour."""
        now = self._clock()
        self._codes = {code: known for code, known in self._codes.items() if known[1] > now}
        code = secrets.token_urlsafe(24)
        self._codes[code] = (who, now + _CODE_LIFE_S)
        return PageLink(path=f"/page/#code={code}")

    async def redeem(self, code: str) -> SignedIn:
        """A token for whoever has the link; the link is used up.

        Raises:
            UnauthenticatedError: If it was used before, is too old, or whoever made it is not known any more.
        """
        who, deadline = self._codes.pop(code, (None, 0.0))
        if who is None or deadline < self._clock():
            raise UnauthenticatedError(
                "this link was used before or is too old; 'slipstream page' prints another one"
            )
        await self._recognize(who)
        return SignedIn(token=await run_in_threadpool(self._tokens.derive, who, _TOKEN_LIFE_S))


def add_page_links(app: FastAPI, api: RunApi, links: PageLinks) -> None:
    """Add the routes that make a link and redeem it; they come before the page's files."""

    @app.post("/page/links", status_code=HTTPStatus.CREATED, include_in_schema=False)
    async def make_link(request: Request, authorization: Annotated[str, Header()] = "") -> PageLink:
        """Make a link for whoever asks."""
        return links.make(await api.authenticate(authorization, peer_of(request)))

    @app.get("/page/who", include_in_schema=False)
    async def who_am_i(request: Request, authorization: Annotated[str, Header()] = "") -> WhoAmI:
        """Tell a browser what it may do, so that it offers that and no more."""
        who = await api.authenticate(authorization, peer_of(request))
        return WhoAmI(name=who.name, project=who.project, role=who.role)

    @app.post("/page/sign-in", include_in_schema=False)
    async def sign_in(asked: SignIn) -> SignedIn:
        """Give a browser that has a link a token."""
        return await links.redeem(asked.code)


def with_run_page(app: FastAPI) -> FastAPI:
    """The application with the run page, and ``/docs``.

    ``/page/`` opens on what is running, and ``/`` leads there; ``/runs/RUN`` opens on one run, and
    ``/runs/RUN/TAB`` on a part of it.
    """

    @app.get("/", include_in_schema=False)
    def to_page() -> RedirectResponse:
        """Show the page to whoever opens the bare address."""
        return RedirectResponse("page/")

    @app.get("/runs/{run_id}", include_in_schema=False)
    @app.get("/runs/{run_id}/{tab}", include_in_schema=False)
    def run_page() -> Response:
        """Show the page; it finds in its own address what to show."""
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        """The API's description, for a person."""
        return FileResponse(_FILES / "docs.html", headers=_HEADERS)

    app.mount("/page", _Page(directory=_FILES, html=True), name="page")
    # Swagger UI as a package has it, so that nothing is asked of a network.
    app.mount("/docs", _Page(packages=[("fastapi_offline", "static")]), name="docs")
    return app


class _Page(StaticFiles):
    """Files that load nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with what the browser must know of it."""
        response = await super().get_response(path, scope)
        if isinstance(response, FileResponse):
            # So much waits here for each of those who do not read it.
            response.chunk_size = _CHUNK_BYTES
        response.headers.update(_HEADERS)
        return response
