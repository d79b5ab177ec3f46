"""Checks of ``helm test`` on an installed release: the API, both gRPC servers, and metrics."""

# ruff: noqa: INP001
import asyncio
import sys
from pathlib import Path

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.client import open_channel
from services.common.security.credentials import Identity, acting_as
from services.common.security.issuer import IssuedTls, Issuer
from services.common.security.tls import Peer

TIMEOUT_S = 20.0
TLS = Path("/etc/slipstream/tls")


def fetch(url: str) -> httpx.Response:
    """Returns the response of a URL."""
    # Clients verify the API's certificate; this only checks that the API answers.
    return httpx.get(url, timeout=TIMEOUT_S, trust_env=False, verify=False).raise_for_status()  # noqa: S501


async def check_health(address: str, peer: Peer, identity: Identity) -> None:
    """Checks the health of a gRPC server."""
    with acting_as(identity):
        channel = open_channel(address, peer)
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{address}: {answer}"


scheme, controller, queue = sys.argv[1:]
# The release has certificates only if TLS is on.
own = Identity(tls=IssuedTls(Issuer(TLS), "test.slipstream") if TLS.exists() else None)
fetch(f"{scheme}://{controller}:8080/healthz")  # needs no token
servers: list[tuple[str, Peer]] = [(controller, "controller"), (queue, "transferqueue")]
for host, peer in servers:
    asyncio.run(check_health(f"{host}:50051", peer, own))
    assert "slipstream_" in fetch(f"http://{host}:9090/metrics").text, f"{host} exposes no metrics"
sys.stdout.write("all services are healthy\n")
