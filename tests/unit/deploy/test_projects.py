"""Tests of the resources of projects: claims, queue, code, secrets, priority class and quota."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import FailedPreconditionError
from services.extras.kubernetes.worker_pods import (
    Pod,
    build_pods,
    load_templates,
    project_namespaces,
    why_volatile,
)
from tests.helpers.chart import CHART, EVERYTHING, Manifest, helm, one, render
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


def pods_of(folder: Path, project: str, vision: dict[str, Any] = VISION) -> dict[str, Pod]:
    config = one(render(*arguments(vision=vision)), "ConfigMap", "demo-slipstream-workers")
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
    annotations = one(manifests, "Namespace", "train-workers")["metadata"]["annotations"]
    assert annotations == {"helm.sh/resource-policy": "keep"}, (
        "the namespace has the project's claims"
    )
    drainless = render(*arguments(vision=VISION), "--set", "controller.drain.enabled=false")
    verbs = one(drainless, "Role", "demo-slipstream-controller")["rules"][0]["verbs"]
    assert "patch" in verbs, "to release pods from the project's queue"


@pytest.mark.parametrize(
    ("project", "key"),
    [
        ({"quota": {"pods": "1"}}, "priorityClassName"),
        ({"namespace": "train-workers"}, "namespace"),
        ({"namespace": "train"}, "namespace"),
        ({"namespace": "train-sandboxes"}, "namespace"),
        ({"namespace": "Vision"}, "namespace"),
        ({"topology": "bundled"}, "topology"),
        ({"modelCache": {"fetch": ["a/b"]}}, "fetch"),
    ],
)
def test_what_a_project_cannot_have_is_refused(project: dict[str, Any], key: str) -> None:
    result = helm("template", "demo", str(CHART), "-n", "train", *arguments(vision=project))
    assert result.returncode != 0
    assert key in result.stderr


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


SEPARATE = {**VISION, "namespace": "vision", "priorityClassName": ""}
"""A project with its own namespace, whose quota needs no priority class."""


def kinds_in(manifests: list[Manifest], namespace: str) -> set[tuple[str, str]]:
    return {
        (manifest["kind"], manifest["metadata"]["name"])
        for manifest in manifests
        if manifest["metadata"].get("namespace") == namespace
    }


def test_the_namespace_of_a_project_has_all_that_the_shared_one_has() -> None:
    sandboxes = '{"enabled": true, "apiTo": [{"ipBlock": {"cidr": "10.96.0.1/32"}}]}'
    further = (
        *EVERYTHING,
        "--set",
        "workers.rolloutScales.enabled=true,workers.jobSet.enabled=true",
    )
    queueless = {**SEPARATE, "kueue": {}}
    manifests = render(
        *further, *arguments(vision=queueless), "--set-json", f"sandboxes={sandboxes}"
    )
    for manifest in manifests:
        if "vision" in (manifest["metadata"].get("namespace"), manifest["metadata"]["name"]):
            validate_manifest(manifest, "1.33")
    quota = ("ResourceQuota", "demo-slipstream-vision")
    theirs, shared = kinds_in(manifests, "vision"), kinds_in(manifests, "train-workers")
    assert theirs - {quota} == {object_ for object_ in shared if object_[0] != "Job"}
    assert quota in theirs
    same = {
        manifest["metadata"]["namespace"]: json.dumps(
            {key: value for key, value in manifest.items() if key != "metadata"}, sort_keys=True
        )
        for manifest in manifests
        if manifest["kind"] == "Role"
        and manifest["metadata"]["name"] == "demo-slipstream-controller"
    }
    assert set(same) == {"vision", "train-workers"}
    assert same["vision"] == same["train-workers"]
    (binding,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == "RoleBinding"
        and manifest["metadata"]["name"] == "demo-slipstream-sandboxes"
    )
    assert [subject["namespace"] for subject in binding["subjects"]] == ["train-workers", "vision"]
    monitor = one(manifests, "PodMonitor", "demo-slipstream")["spec"]["namespaceSelector"]
    assert monitor["matchNames"] == ["train", "train-workers", "vision"]


def test_pods_of_a_project_are_in_its_namespace(tmp_path: Path) -> None:
    for pod in pods_of(tmp_path, "vision", SEPARATE).values():
        assert pod["metadata"]["namespace"] == "vision"
        assert "slipstream.dev/counted-priority-class" not in pod["metadata"]["annotations"]
    for pod in pods_of(tmp_path, "speech", SEPARATE).values():
        assert pod["metadata"]["namespace"] == "train-workers"
    assert project_namespaces(tmp_path) == {"vision"}


@pytest.mark.parametrize(
    ("values", "name_of_template"),
    [("workers.jobSet.enabled=true", "job_set"), ("workers.gang.scheduler=volcano", "pod_group")],
)
def test_groups_of_pods_are_in_the_namespace_of_the_pods(
    tmp_path: Path, values: str, name_of_template: str
) -> None:
    project = {"namespace": "vision"}
    config = one(
        render(*arguments(vision=project), "--set", values), "ConfigMap", "demo-slipstream-workers"
    )
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    for name, namespace in (("vision", "vision"), ("", "train-workers")):
        template = getattr(load_templates(tmp_path, name), name_of_template)
        assert template["metadata"]["namespace"] == namespace


def test_the_quota_of_a_namespace_counts_all_of_its_pods() -> None:
    manifests = render(*arguments(vision=SEPARATE))
    quota = one(manifests, "ResourceQuota", "demo-slipstream-vision")
    assert quota["metadata"]["namespace"] == "vision"
    assert quota["spec"] == {"hard": VISION["quota"]}
    metadata = one(manifests, "Namespace", "vision")["metadata"]
    assert metadata["annotations"] == {"helm.sh/resource-policy": "keep"}, (
        "it has the project's claims"
    )
    assert metadata["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert "annotations" not in one(manifests, "Namespace", "train-workers")["metadata"]
    existing = {**SEPARATE, "createNamespace": False}
    names = [
        manifest["metadata"]["name"]
        for manifest in render(*arguments(vision=existing))
        if manifest["kind"] == "Namespace"
    ]
    assert names == ["train-workers"]


def test_numbers_of_a_quota_become_text_which_the_api_server_needs() -> None:
    project = {"namespace": "vision", "quota": {"pods": 20, "requests.nvidia.com/gpu": 64}}
    manifests = render(
        *arguments(vision=project), "--set", "workers.projects.vision.quota.secrets=7"
    )
    quota = one(manifests, "ResourceQuota", "demo-slipstream-vision")
    hard = {"pods": "20", "requests.nvidia.com/gpu": "64", "secrets": "7"}
    assert quota["spec"]["hard"] == hard


def test_a_project_can_do_without_the_claims_of_all_runs(tmp_path: Path) -> None:
    claimless = {"checkpoints": {"existingClaim": ""}, "modelCache": {"existingClaim": ""}}
    claims = "workers.checkpoints.existingClaim=runs,workers.modelCache.existingClaim=models"
    manifests = render(*arguments(vision={"namespace": "vision", **claimless}), "--set", claims)
    for name, text in one(manifests, "ConfigMap", "demo-slipstream-workers")["data"].items():
        (tmp_path / name).write_text(text)
    for project, expected in (("vision", set()), ("", {"runs", "models"})):
        for pod in load_templates(tmp_path, project).pods.values():
            volumes = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
            assert {claim["claimName"] for claim in volumes if claim} == expected
    assert "annotations" not in one(manifests, "Namespace", "vision")["metadata"]


def test_two_projects_cannot_share_a_namespace() -> None:
    shared = {"namespace": "team"}
    result = helm("template", "demo", str(CHART), *arguments(vision=shared, speech=shared))
    assert result.returncode != 0
    assert "workers.projects.vision.namespace" in result.stderr
