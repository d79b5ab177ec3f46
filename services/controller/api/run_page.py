"""Serves the run page: static files that show runs through the REST API, without anything from elsewhere."""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

_FILES = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def with_run_page(app: FastAPI) -> FastAPI:
    """The application with the run page at ``/page/`` and a redirect to it from ``/``."""

    @app.get("/", include_in_schema=False)
    def to_page() -> RedirectResponse:
        """Show the page to whoever opens the bare address."""
        return RedirectResponse("page/")

    app.mount("/page", _Page(directory=_FILES, html=True), name="page")
    return app


class _Page(StaticFiles):
    """Files that load nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with what the browser must know of it."""
        response = await super().get_response(path, scope)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["Cache-Control"] = "no-cache"
        return response
