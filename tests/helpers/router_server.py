"""Router that lists servers: ``python -m tests.helpers.router_server PORT FILE``.

The file has the address of a server in each line. It is read at each request, so that servers come and go.
"""

import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def main() -> None:
    """Serves the list until it is killed."""
    port, path = int(sys.argv[1]), Path(sys.argv[2])

    def workers(request: Request) -> Response:
        servers = path.read_text(encoding="utf-8").split()
        return JSONResponse(
            {"workers": [{"url": url, "worker_type": "regular"} for url in servers]}
        )

    app = Starlette(routes=[Route("/workers", workers)])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
