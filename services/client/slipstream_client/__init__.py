"""Client of a Slipstream controller: ``Client``, and ``AsyncClient`` with the same methods.

with Client() as client:
    run = client.submit("my.yaml")
    print(run.wait().state)
"""

from slipstream_client.async_client import AsyncClient, AsyncRun
from slipstream_client.request import ApiError, RunFailedError
from slipstream_client.sync_client import Client, Run

__all__ = ["ApiError", "AsyncClient", "AsyncRun", "Client", "Run", "RunFailedError"]
