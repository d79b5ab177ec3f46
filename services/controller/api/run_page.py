"""Serves the run page: static files that show runs through the REST API, without anything from elsewhere."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles

_FILES = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def with_run_page(app: FastAPI) -> FastAPI:
    """The application with the run page at ``/page/`` and a redirect to it from ``/``."""

    @app.get("/", include_in_schema=False)
    def to_page() -> RedirectResponse:
        """Show the page to whoever opens the bare address."""
        return RedirectResponse("page/")

    @app.middleware("http")
    async def restrict_page(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        if request.url.path.startswith("/page/"):
            response.headers["Content-Security-Policy"] = _POLICY
            response.headers["Cache-Control"] = "no-cache"
        return response

    app.mount("/page", StaticFiles(directory=_FILES, html=True), name="page")
    return app
