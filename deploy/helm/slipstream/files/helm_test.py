"""What `helm test` asks of an installed release: the API, both gRPC servers, and metrics."""

import json
import sys
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 20.0


def fetch(url: str) -> str:
    """The body behind a URL."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        return str(response.read().decode())


def check_health(address: str) -> None:
    """Ask a gRPC server for its health."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{address}: {answer}"


controller, queue = sys.argv[1:]
release = json.loads(fetch(f"http://{controller}:8080/v1/version"))["version"]
runs = json.loads(fetch(f"http://{controller}:8080/v1/runs"))["items"]
for host in (controller, queue):
    check_health(f"{host}:50051")
    assert "slipstream_" in fetch(f"http://{host}:9090/metrics"), f"{host} exposes no metrics"
sys.stdout.write(f"Slipstream {release} answers; it knows {len(runs)} runs\n")
