"""Tests of the resources of projects: claims, queue, code, secrets, priority class and quota."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import FailedPreconditionError
from services.extras.kubernetes.worker_pods import Pod, build_pods, load_templates, why_volatile
from tests.helpers.chart import CHART, helm, one, render
from tests.helpers.manifests import validate_manifest
from tests.helpers.specs import spec_with
from tests.unit.deploy.test_worker_pods import OWNER, SMALL

VISION = {
    "checkpoints": {"existingClaim": "vision-checkpoints"},
    "modelCache": {"existingClaim": "vision-models"},
    "kueue": {"queueName": "vision"},
    "codeConfigMap": "vision-code",
    "secrets": "vision-secrets",
    "priorityClassName": "vision",
    "podLabels": {"cost-centre": "7"},
    "quota": {"pods": "20", "requests.nvidia.com/gpu": "64"},
}


def arguments(**projects: dict[str, Any]) -> tuple[str, ...]:
    return (
        *("--set-json", f"workers.projects={json.dumps(projects)}"),
        *("--set", "workers.codeConfigMap=everyone,workers.logLevel=DEBUG"),
    )


def pods_of(folder: Path, project: str) -> dict[str, Pod]:
    config = one(render(*arguments(vision=VISION)), "ConfigMap", "demo-slipstream-workers")
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    pods = build_pods(
        load_templates(folder, project),
        "run_0198",
        spec_with(**SMALL),
        controller_address="c:50051",
        owner=OWNER,
    )
    for pod in pods:
        validate_manifest(pod, "1.33")
    return {pod["spec"]["containers"][0]["name"]: pod for pod in pods}


def sources(pod: Pod) -> dict[str, str]:
    """Returns the names of the objects that a pod mounts, by its volumes."""
    keys = (
        *(("persistentVolumeClaim", "claimName"), ("configMap", "name"), ("secret", "secretName")),
    )
    return {
        volume["name"]: volume[kind][key]
        for volume in pod["spec"]["volumes"]
        for kind, key in keys
        if kind in volume and volume["name"] != "tls"
    }


def test_the_runs_of_a_project_have_its_claims_queue_code_and_secrets(tmp_path: Path) -> None:
    for pod in pods_of(tmp_path, "vision").values():
        assert sources(pod) == {
            "runs": "vision-checkpoints",
            "cache": "vision-models",
            "code": "vision-code",
            "secrets": "vision-secrets",
        }
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "vision"
        assert pod["metadata"]["labels"]["cost-centre"] == "7"
        assert pod["spec"]["priorityClassName"] == "vision"
        (container,) = pod["spec"]["containers"]
        assert "DEBUG" in json.dumps(container["env"]), "other values are those of all runs"


@pytest.mark.parametrize("project", ["speech", "", "../vision", "vision.trainer"])
def test_other_projects_have_what_all_runs_have(tmp_path: Path, project: str) -> None:
    for pod in pods_of(tmp_path, project).values():
        assert sources(pod) == {"code": "everyone"}
        assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"]


def test_checkpoints_on_a_projects_claim_outlive_the_trainer(tmp_path: Path) -> None:
    pods_of(tmp_path, "")
    folder = "/var/lib/slipstream"
    assert why_volatile(load_templates(tmp_path, "vision").pods["trainer"], folder) == ""
    assert why_volatile(load_templates(tmp_path).pods["trainer"], folder)


def test_a_quota_counts_the_pods_of_the_projects_priority_class() -> None:
    manifests = render(*arguments(vision=VISION))
    quota = one(manifests, "ResourceQuota", "demo-slipstream-vision")
    assert quota["metadata"]["namespace"] == "train-workers"
    assert quota["spec"]["hard"] == VISION["quota"]
    (scope,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert (scope["scopeName"], scope["values"]) == ("PriorityClass", ["vision"])
    validate_manifest(quota, "1.33")
    kept = one(manifests, "Namespace", "train-workers")["metadata"]["annotations"]
    assert kept == {"helm.sh/resource-policy": "keep"}, "the namespace has the project's claims"
    drainless = render(*arguments(vision=VISION), "--set", "controller.drain.enabled=false")
    verbs = one(drainless, "Role", "demo-slipstream-controller")["rules"][0]["verbs"]
    assert "patch" in verbs, "to release pods from the project's queue"


@pytest.mark.parametrize(
    ("project", "key"),
    [
        ({"quota": {"pods": "1"}}, "priorityClassName"),
        ({"topology": "bundled"}, "topology"),
        ({"modelCache": {"fetch": ["a/b"]}}, "fetch"),
    ],
)
def test_what_a_project_cannot_have_is_refused(project: dict[str, Any], key: str) -> None:
    done = helm("template", "demo", str(CHART), *arguments(vision=project))
    assert done.returncode != 0
    assert key in done.stderr


@pytest.mark.parametrize("chosen", [{"priority_class": "batch"}, {"templates": ["batch"]}])
def test_no_pod_of_a_project_evades_its_quota(tmp_path: Path, chosen: dict[str, Any]) -> None:
    overrides = {
        "priorityClasses": ["batch"],
        "templates": {"batch": {"priorityClassName": "batch"}},
    }
    unlimited = {name: value for name, value in VISION.items() if name != "quota"}
    manifests = render(
        *arguments(vision=VISION, speech=unlimited),
        *("--set-json", f"workers.overrides={json.dumps(overrides)}"),
    )
    for name, text in one(manifests, "ConfigMap", "demo-slipstream-workers")["data"].items():
        (tmp_path / name).write_text(text)
    spec = spec_with(**SMALL, pods={"rollout": chosen})
    with pytest.raises(FailedPreconditionError, match=r"quota.*pods\.rollout\.priority_class"):
        build_pods(
            load_templates(tmp_path, "vision"),
            "run_0198",
            spec,
            controller_address="c:1",
            owner=OWNER,
        )
    pods = build_pods(
        load_templates(tmp_path, "speech"), "run_0198", spec, controller_address="c:1", owner=OWNER
    )
    assert {pod["spec"]["priorityClassName"] for pod in pods} == {"vision", "batch"}


def test_templates_of_projects_are_in_their_config_map_only() -> None:
    service = one(render(*arguments(vision=VISION)), "Service", "demo-slipstream-workers")
    validate_manifest(service, "1.33")
    assert service["metadata"].keys() == {"name", "namespace", "labels"}
