"""A run that attaches to servers of a headless Service, which the chart's values name (docs/fleets.md)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes.client import AppsV1Api

from tests.cluster.node import Cluster
from tests.cluster.release import (
    CLEARING_S,
    NAMESPACE,
    WORKERS,
    Installed,
    assert_ledger_closes,
    create_namespace,
    eventually,
    installed_release,
    namespaces,
    sort4_spec,
)
from tests.helpers.chart import CHART, PROFILES, ROOT
from tests.helpers.tools import CACHE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_FLEET = "fleet"
"""Namespace of the servers in the profile."""
_SERVICE = "vllm"
_PORT = 8000
_SECRET = "fleet-token"
_TOKEN = "a-token-of-servers"
_STEPS = 10
_STAND_IN = f"exec python /fleet/torch_server.py {_PORT} /fleet/run.yaml $VLLM_API_KEY 0.0.0.0"
"""Serves with the engine of this project, on whose image vLLM is not installed."""
_VLLM = f"""
set -e
model=$(python -c '
from pathlib import Path
from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.rollout.engines.engine_config import cached_config_folder
model = load_spec(Path("/fleet/run.yaml")).model
print(cached_config_folder(load_config(model, load_tokenizer(model)), Path("/tmp/models")))
' | tail -1)
exec python -m services.extras.fleets.serve --model "$model" --host 0.0.0.0 --port {_PORT} \\
  --dtype float32 --max-model-len 64 --max-num-batched-tokens 2048
"""
"""Serves with vLLM's CPU build, which has random weights until the run sends its own."""


def _kind(name: str, image: str, program: str, **arguments: int) -> Any:
    is_missing = not (CACHE / "images" / f"{image}.tar").exists()
    reason = f"tests/cluster/images.sh was not asked for the image {image}"
    mark = pytest.mark.skipif(is_missing, reason=reason)
    return pytest.param(
        f"localhost/slipstream/{image}:test", program, arguments, id=name, marks=mark
    )


KINDS = [
    _kind("stand-in", "rollout", _STAND_IN),
    _kind("vllm", "rollout-vllm", _VLLM, max_model_len=64),
]


@pytest.fixture(scope="module")
def installed(machine: Cluster) -> Iterator[Installed]:
    with installed_release(machine, has_trackers=False) as release:
        for namespace in (NAMESPACE, WORKERS):
            secret: Any = {"metadata": {"name": _SECRET}, "stringData": {"FLEET_TOKEN": _TOKEN}}
            machine.core.create_namespaced_secret(namespace, secret)
        release.helm(
            "upgrade", "demo", str(CHART), "--reset-then-reuse-values", "--wait",
            "-f", str(PROFILES / "vllm-servers.yaml"),
            # The profile's rollouts are those of large models.
            *("--set", "rollout.resources.requests.cpu=100m,rollout.resources.requests.memory=512Mi"),
            *("--set", "rollout.resources.limits.memory=3Gi"),
        )  # fmt: skip
        release.ready()
        yield release


@contextmanager
def served(cluster: Cluster, image: str, program: str) -> Iterator[None]:
    """Runs two servers of a headless Service until the block ends; they may still be starting."""
    create_namespace(cluster, _FLEET)
    files = {
        "run.yaml": json.dumps(sort4_spec()),
        "torch_server.py": (ROOT / "tests/helpers/torch_server.py").read_text(encoding="utf-8"),
    }
    code: Any = {"metadata": {"name": "files"}, "data": files}
    cluster.core.create_namespaced_config_map(_FLEET, code)
    labels = {"app": _SERVICE}
    service: Any = {
        "metadata": {"name": _SERVICE},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": _PORT}]},
    }
    cluster.core.create_namespaced_service(_FLEET, service)
    container = {
        "name": "server",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["bash", "-c", program],
        # Without a request, a busy node gives the server no processor.
        "resources": {"requests": {"cpu": "300m"}},
        "env": [
            {"name": "VLLM_API_KEY", "value": _TOKEN},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "HOME", "value": "/tmp"},
        ],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}, "timeoutSeconds": 10},
        "volumeMounts": [{"name": "files", "mountPath": "/fleet"}],
    }
    volume = {"name": "files", "configMap": {"name": "files"}}
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "containers": [container],
            "volumes": [volume],
            "terminationGracePeriodSeconds": 5,
        },
    }
    servers: Any = {
        "metadata": {"name": _SERVICE},
        "spec": {
            "serviceName": _SERVICE,
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }
    AppsV1Api(cluster.core.api_client).create_namespaced_stateful_set(_FLEET, servers)
    try:
        yield
    finally:
        for pod in (f"{_SERVICE}-0", f"{_SERVICE}-1"):
            logs = cluster.command("kubectl", "-n", _FLEET, "logs", pod, "--tail", "200")
            (cluster.folder / f"{pod}.log").write_text(logs, encoding="utf-8")
        cluster.core.delete_namespace(_FLEET)
        eventually(lambda: _FLEET not in namespaces(cluster), CLEARING_S)


@pytest.mark.parametrize(("image", "program", "arguments"), KINDS)
def test_a_run_attaches_to_the_servers_of_a_service_that_the_chart_names(
    installed: Installed, image: str, program: str, arguments: dict[str, int]
) -> None:
    with served(installed.cluster, image, program):
        warm_start = sort4_spec()["model"]["warm_start"] | {"steps": 50}
        run_id = installed.submit(
            model={"warm_start": warm_start},
            rollout={
                "engine": "vllm-server",
                "engine_arguments": {"fleet": "shared", **arguments},
                "replicas": 1,
            },
            # Each token is then sampled under the version that is trained.
            algorithm={"max_staleness": 0},
            weight_sync={"mode": "cpu_async"},
            trainer={"steps": _STEPS},
            validation={"every": 0},
            limits={"start_timeout_s": 900},
        )
        installed.wait(run_id, lambda run: run["step"] >= 1, timeout_s=900)
        fleet = installed.api.get("/v1/fleets/shared").raise_for_status().json()
        run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=600)
    assert run["step"] == _STEPS
    assert run["summary"]["staleness"]["max"] == 0
    assert_ledger_closes(run)
    addresses = [f"http://{_SERVICE}-{i}.{_SERVICE}.{_FLEET}.svc:{_PORT}" for i in range(2)]
    assert [(server["address"], server["problem"]) for server in fleet["servers"]] == [
        (address, "") for address in addresses
    ]
    owners = {server["exclusive_run"] for server in fleet["servers"]}
    assert {run_id} <= owners <= {run_id, None}
    # Tokens under other weights than those of their version would differ by whole nats.
    query = {"name": "kl_rollout"}
    metrics = installed.api.get(f"/v1/runs/{run_id}/metrics", params=query).raise_for_status()
    (divergence,) = metrics.json()["items"]
    assert len(divergence["values"]) == _STEPS
    assert max(divergence["values"]) < 1e-5
