"""Tests of optional parts of the chart, such as tracing, the gRPC route and downloaded models."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from services.controller.settings import Limits
from services.extras.fleets.directory import FleetDirectory
from tests.helpers.chart import (
    CHART,
    EVERYTHING,
    Manifest,
    helm,
    one,
    pods,
    render,
    worker_templates,
)
from tests.helpers.manifests import validate_manifest

_PREFIX = "SLIPSTREAM_CONTROLLER_"


def test_every_service_sends_its_spans_to_the_same_collector() -> None:
    endpoint = "http://collector.tracing.svc:4317"
    for component, pod in pods(render(*EVERYTHING)).items():
        environment = pod["spec"]["containers"][0].get("env", [])
        values = {item["name"]: item.get("value") for item in environment}
        is_service = component not in ("test", "fetch", "trackers")
        assert (values.get("SLIPSTREAM_TRACE_ENDPOINT") == endpoint) is is_service, component
    assert "TRACE" not in json.dumps(render())


def test_only_the_service_of_runs_is_routed_to_users_of_grpc() -> None:
    parents = 'grpcRoute={"enabled": true, "parentRefs": [{"name": "gateway"}]}'
    manifests = render("--set-json", parents, "--set", "tls.mode=off")
    (rule,) = one(manifests, "GRPCRoute", "demo-slipstream-controller")["spec"]["rules"]
    assert rule["matches"] == [{"method": {"service": "slipstream.controller.v1.RunService"}}]
    assert rule["backendRefs"] == [{"name": "demo-slipstream-controller", "port": 50051}]


def test_metrics_of_every_service_may_need_a_token_which_the_monitor_sends() -> None:
    secret = "monitoring.tokenSecret.name=scrape,monitoring.tokenSecret.key=bearer"
    manifests = render(*EVERYTHING, "--set", secret)
    for component, pod in pods(manifests).items():
        (container, *_) = pod["spec"]["containers"]
        values = {item["name"]: item.get("value") for item in container.get("env", [])}
        files = [value for name, value in values.items() if name.endswith("_METRICS_TOKEN_FILE")]
        if component in ("test", "fetch", "trackers", "monitoring"):
            assert not files, component
            continue
        assert files == ["/etc/slipstream/metrics/token"], component
        mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
        assert mounts["metrics-token"] == "/etc/slipstream/metrics"
        (volume,) = [item for item in pod["spec"]["volumes"] if item["name"] == "metrics-token"]
        items = [{"key": "bearer", "path": "token"}]
        assert volume["secret"] == {"secretName": "scrape", "items": items}
    (monitor,) = [manifest for manifest in manifests if manifest["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "scrape", "key": "bearer"}
    assert "metrics-token" not in json.dumps(render(*EVERYTHING))


def test_keys_of_trackers_reach_their_pod_alone() -> None:
    for component, pod in pods(render(*EVERYTHING)).items():
        assert ("tracker-keys" in json.dumps(pod)) is (component == "trackers"), component


def test_a_registry_of_all_charts_wins() -> None:
    values = "image.registry=own.example.com,global.imageRegistry=all.example.com,global.other=1"
    for pod in pods(render(*EVERYTHING, "--set", values)).values():
        for container in pod["spec"]["containers"]:
            assert container["image"].startswith("all.example.com/slipstream/")


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ("nameOverride=", "http://127.0.0.1:8080"),
        ("controller.restTls.existingSecret=api", "https://127.0.0.1:8080"),
        ("ingress.enabled=true,ingress.host=a.example.com", "https://a.example.com"),
        (
            "httpRoute.enabled=true,httpRoute.hostnames={b.example.com},httpRoute.parentRefs[0].name=g",
            "https://b.example.com",
        ),
    ],
    ids=["forwarded", "https", "ingress", "gateway"],
)
def test_the_notes_say_where_the_api_is(values: str, url: str) -> None:
    result = helm("install", "demo", str(CHART), "--dry-run=client", "--set", values)
    assert result.returncode == 0, result.stderr
    (printed_url,) = re.findall(r"export SLIPSTREAM_URL=(\S+)", result.stdout)
    assert printed_url == url


def test_quotas_of_projects_are_settings_of_the_controller() -> None:
    quotas = "controller.quotas.maxTransferqueueBytes=8796093022208,controller.quotas.maxGpus=64"
    container = pods(render("--set", quotas))["controller"]["spec"]["containers"][0]
    values = {item["name"]: item.get("value") for item in container["env"]}
    limits = {field.name: values[f"{_PREFIX}{field.name.upper()}"] for field in fields(Limits)}
    assert limits == {
        "max_active_runs": "16",
        "max_queued_runs": "1000",
        "max_gpus": "64",
        "max_transferqueue_bytes": "8796093022208",
        "max_checkpoint_bytes": "0",
        "max_requests_per_second": "100",
        "max_event_streams": "256",
    }
    refused = helm("template", "demo", str(CHART), "--set", "controller.quotas.maxGpus=-1")
    assert refused.returncode != 0


def test_pods_may_be_changed_only_where_a_queue_keeps_them_or_nodes_are_drained() -> None:
    def verbs(*values: str, drain: str = "false") -> list[str]:
        arguments = ("--set", f"controller.drain.enabled={drain}", *values)
        role = one(render(*arguments), "Role", "demo-slipstream-controller")
        (verbs,) = [rule["verbs"] for rule in role["rules"] if rule["resources"] == ["pods"]]
        return verbs

    assert "patch" not in verbs()
    assert "patch" in verbs(drain="true")
    assert "patch" in verbs("--set", "workers.kueue.queueName=gpus")


def test_the_controller_makes_job_sets_only_where_asked_and_never_in_a_queue() -> None:
    def rules(*values: str) -> list[Manifest]:
        role = one(render(*values), "Role", "demo-slipstream-controller")
        return [rule for rule in role["rules"] if rule["resources"] == ["jobsets"]]

    assert rules() == []
    (rule,) = rules("--set", "workers.jobSet.enabled=true")
    assert rule["verbs"] == ["create", "delete"]
    both = "workers.jobSet.enabled=true,workers.kueue.queueName=gpus"
    refused = helm("template", "demo", str(CHART), "--set", both)
    assert refused.returncode != 0
    assert "workers.jobSet.enabled and workers.kueue.queueName exclude each other" in refused.stderr


def test_models_are_fetched_into_the_cache_by_a_job_of_their_list() -> None:
    def job(models: str) -> Manifest:
        values = f"workers.modelCache.existingClaim=models,workers.modelCache.fetch={{{models}}}"
        (manifest,) = [m for m in render("--set", values) if m["kind"] == "Job"]
        return manifest

    manifest = job("a/b@1,datasets/c/d")
    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][1:] == ["a/b@1", "datasets/c/d"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in spec["volumes"]
    assert manifest["metadata"]["name"] == job("a/b@1,datasets/c/d")["metadata"]["name"]
    assert manifest["metadata"]["name"] != job("a/b@2,datasets/c/d")["metadata"]["name"]


def test_the_job_downloads_the_listed_models(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        "def snapshot_download(name, *, repo_type, revision):\n"
        "    return f'{name} {repo_type} {revision}'\n"
    )
    result = subprocess.run(
        [sys.executable, CHART / "files" / "fetch_models.py", "a/b@1", "datasets/c/d"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout.splitlines() == [
        "a/b@1 is in a/b model 1",
        "datasets/c/d is in c/d dataset None",
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("ingress.enabled=true,ingress.tls.enabled=false", "ingress without TLS"),
        ("controller.service.type=LoadBalancer", "controller.restTls.existingSecret"),
    ],
)
def test_tokens_are_not_published_in_plain_http(values: str, problem: str) -> None:
    refused = helm("template", "demo", str(CHART), "--set", values)
    assert refused.returncode != 0
    assert problem in refused.stderr
    for value in ("ingress.tls.elsewhere=true", "controller.restTls.existingSecret=tls"):
        if ("ingress" in value) == ("ingress" in values):
            assert (
                helm("template", "demo", str(CHART), "--set", f"{values},{value}").returncode == 0
            )


@pytest.mark.parametrize("profiles", [(), ("cpu-smoke",), ("multi-node",)])
def test_every_scratch_volume_has_a_limit(profiles: tuple[str, ...]) -> None:
    manifests = render("--set", "controller.persistence.enabled=false", profiles=profiles)
    for component, pod in pods(manifests).items():
        for volume in pod["spec"].get("volumes", []):
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), (component, volume["name"])


def test_rollouts_start_pods_only_in_a_namespace_without_egress() -> None:
    peers = '[{"ipBlock": {"cidr": "10.96.0.1/32"}}]'
    manifests = render(
        *("--set", "sandboxes.enabled=true", "--set", "sandboxes.quota.pods=500"),
        *("--set-json", f"sandboxes.apiTo={peers}"),
    )
    templates = worker_templates(manifests)
    volumes = {
        role: {volume["name"] for volume in template["spec"]["volumes"]}
        for role, template in templates.items()
    }
    assert "kubernetes" in volumes["rollout"] - volumes["trainer"]
    variables = {
        variable["name"]: variable
        for variable in templates["rollout"]["spec"]["containers"][0]["env"]
    }
    assert variables["SLIPSTREAM_ROLLOUT_SANDBOX_NAMESPACE"]["value"] == "train-sandboxes"
    sandbox_manifests = [
        manifest
        for manifest in manifests
        if manifest["metadata"].get("namespace") == "train-sandboxes"
    ]
    kinds = {manifest["kind"]: manifest for manifest in sandbox_manifests}
    assert {*kinds} == {"NetworkPolicy", "Role", "RoleBinding", "ResourceQuota"}
    assert kinds["NetworkPolicy"]["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }
    (subject,) = kinds["RoleBinding"]["subjects"]
    assert subject["namespace"] == "train-workers"
    assert one(manifests, "Namespace", "train-sandboxes")
    (rule,) = one(manifests, "NetworkPolicy", "demo-slipstream-egress-rollouts")["spec"]["egress"]
    assert rule["to"] == json.loads(peers)
    assert "train-sandboxes" not in str(render())


@pytest.mark.parametrize(
    ("values", "key"),
    [("", "sandboxes.apiTo"), (",sandboxes.namespace=train-workers", "sandboxes.namespace")],
)
def test_sandboxes_that_would_open_a_namespace_are_refused(values: str, key: str) -> None:
    result = helm(
        *("template", "demo", str(CHART), "-n", "train", "--set", f"sandboxes.enabled=true{values}")
    )
    assert key in result.stderr


def test_fleets_of_the_values_are_what_the_controller_reads(tmp_path: Path) -> None:
    manifests = render(profiles=["vllm-servers"])
    config = one(manifests, "ConfigMap", "demo-slipstream-fleets")
    file = tmp_path / "fleets.json"
    file.write_text(config["data"]["fleets.json"], encoding="utf-8")
    spec = {"rollout": {"engine_arguments": {"fleet": "shared", "max_model_len": 4096}}}
    resolved = asyncio.run(FleetDirectory(file).resolve(spec))["rollout"]["engine_arguments"]
    addresses = [f"http://vllm-{index}.vllm.fleet.svc:8000" for index in (0, 1)]
    token = {"secret": "FLEET_TOKEN"}
    assert resolved == {"max_model_len": 4096, "addresses": addresses, "token": token}
    pod = one(manifests, "Deployment", "demo-slipstream-controller")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    assert environment["SLIPSTREAM_CONTROLLER_FLEETS_FILE"] == f"{mounts['fleets']}/fleets.json"
    (volume,) = (item for item in pod["volumes"] if item["name"] == "fleets")
    files, secret = (next(iter(source.values())) for source in volume["projected"]["sources"])
    assert files["name"] == "demo-slipstream-fleets"
    (item,) = secret["items"]
    token_file = json.loads(file.read_text())["shared"]["token_file"]
    assert (secret["name"], token_file) == ("fleet-token", f"{mounts['fleets']}/{item['path']}")
    for worker in worker_templates(manifests).values():
        values = {item["name"]: item for item in worker["spec"]["containers"][0]["env"]}
        (hosts,) = (item["value"] for name, item in values.items() if name.endswith("REWARD_HOSTS"))
        assert json.loads(hosts) == ["vllm-0.vllm.fleet.svc", "vllm-1.vllm.fleet.svc"]
    assert json.loads(environment["SLIPSTREAM_CONTROLLER_REWARD_HOSTS"]) == json.loads(hosts)
    for name in ("egress-controller", "egress-workers"):
        policy = one(manifests, "NetworkPolicy", f"demo-slipstream-{name}")
        peers = [peer for rule in policy["spec"]["egress"] for peer in rule.get("to", ())]
        assert "fleet" in json.dumps(peers), name
    validate_manifest(config, "1.33")


def test_an_installation_without_fleets_has_no_file_of_them() -> None:
    manifests = render()
    assert "FLEETS_FILE" not in json.dumps(manifests)
    assert "fleets" not in json.dumps(manifests)


@pytest.mark.parametrize(
    ("fleet", "key"),
    [
        ({"addresses": []}, "addresses"),
        ({"secret": "FLEET_TOKEN"}, "addresses"),
        ({"addresses": ["vllm:8000"]}, "addresses"),
        ({"addresses": ["http://vllm:8000"], "tokenSecret": {"key": "x"}}, "name"),
        ({"addresses": ["http://vllm:8000"], "token": "x"}, "token"),
    ],
)
def test_fleets_that_runs_could_not_use_are_refused(fleet: dict[str, Any], key: str) -> None:
    result = helm(
        *("template", "demo", str(CHART), "--set-json", f"fleets={json.dumps({'shared': fleet})}")
    )
    assert result.returncode != 0
    assert key in result.stderr
    assert "fleets" in result.stderr
