"""What `helm test` asks of an installed release: the API, both gRPC servers, and metrics."""

# ruff: noqa: INP001
import sys

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 20.0


def fetch(url: str) -> httpx.Response:
    """The answer behind a URL."""
    return httpx.get(url, timeout=TIMEOUT_S, trust_env=False).raise_for_status()


def check_health(address: str) -> None:
    """Ask a gRPC server for its health."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{address}: {answer}"


controller, queue = sys.argv[1:]
fetch(f"http://{controller}:8080/healthz")  # what needs no token
for host in (controller, queue):
    check_health(f"{host}:50051")
    assert "slipstream_" in fetch(f"http://{host}:9090/metrics").text, f"{host} exposes no metrics"
sys.stdout.write("every service answers\n")
