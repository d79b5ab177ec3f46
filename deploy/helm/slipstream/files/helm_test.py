"""What `helm test` asks of an installed release: the API, both gRPC servers, and metrics."""

# ruff: noqa: INP001
import sys
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 20.0
TLS = Path("/etc/slipstream/tls")


def fetch(url: str) -> httpx.Response:
    """The answer behind a URL."""
    # Users check the certificate of the API; here it is only asked whether it answers.
    return httpx.get(url, timeout=TIMEOUT_S, trust_env=False, verify=False).raise_for_status()  # noqa: S501


def open_channel(address: str, peer: str) -> grpc.Channel:
    """A channel to a gRPC server, with a worker's certificate if the release has any."""
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", f"{peer}.slipstream"),
    ]
    if not TLS.exists():
        return grpc.insecure_channel(address, options=options)
    authority, key, chain = ((TLS / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    return grpc.secure_channel(address, credentials, options=options)


def check_health(address: str, peer: str) -> None:
    """Ask a gRPC server for its health."""
    with open_channel(address, peer) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{address}: {answer}"


scheme, controller, queue = sys.argv[1:]
fetch(f"{scheme}://{controller}:8080/healthz")  # what needs no token
for host, peer in ((controller, "controller"), (queue, "transferqueue")):
    check_health(f"{host}:50051", peer)
    assert "slipstream_" in fetch(f"http://{host}:9090/metrics").text, f"{host} exposes no metrics"
sys.stdout.write("every service answers\n")
