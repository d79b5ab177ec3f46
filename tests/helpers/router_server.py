"""Router that lists servers: ``python -m tests.helpers.router_server PORT SERVER...``."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def main() -> None:
    """Serves the list until it is killed."""
    port, servers = int(sys.argv[1]), sys.argv[2:]

    async def workers(request: Request) -> Response:
        return JSONResponse(
            {"workers": [{"url": url, "worker_type": "regular"} for url in servers]}
        )

    app = Starlette(routes=[Route("/workers", workers)])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
