"""Tests of the parts of pods that administrators add, and of what a run may choose."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import SpecError
from services.extras.kubernetes.pod_rules import pod_problems
from services.extras.kubernetes.pod_templates import Overrides
from services.extras.kubernetes.worker_pods import Pod
from tests.helpers.chart import CHART, helm
from tests.helpers.manifests import validate_manifest
from tests.helpers.specs import spec_with
from tests.unit.deploy.test_worker_pods import SMALL, build, sizes

DATASETS = {
    "volumes": [{"name": "datasets", "persistentVolumeClaim": {"claimName": "team-datasets"}}],
    "volumeMounts": [{"name": "datasets", "mountPath": "/data", "readOnly": True}],
}
PROXY = {
    "initContainers": [
        {
            "name": "proxy",
            "image": "proxy:1",
            "restartPolicy": "Always",
            "env": [{"name": "A", "value": "1"}],
        }
    ]
}
OVERRIDES = {
    "max": {"cpu": "32", "memory": "512Gi", "sharedMemory": "64Gi", "ephemeralStorage": "1Ti"},
    "nodeSelector": ["zone"],
    "tolerations": ["dedicated"],
    "annotations": ["team.example.com/", "priority"],
    "priorityClasses": ["batch"],
    "templates": {"datasets": DATASETS, "proxy": PROXY},
}
CHOSEN = {
    "cpu": 8,
    "memory": "300Gi",
    "shared_memory": "40Gi",
    "ephemeral_storage": "500Gi",
    "node_selector": {"zone": "a"},
    "tolerations": [{"key": "dedicated", "value": "rl", "effect": "NoSchedule"}],
    "annotations": {"team.example.com/cost": "7", "priority": "low"},
    "priority_class": "batch",
    "templates": ["datasets", "proxy"],
}


def values(**workers: Any) -> tuple[str, ...]:
    return tuple(
        text
        for name, value in workers.items()
        for text in ("--set-json", f"workers.{name}={json.dumps(value)}")
    )


def by_worker(pods: list[Pod]) -> dict[str, Pod]:
    return {pod["spec"]["containers"][0]["name"]: pod for pod in pods}


def test_the_administrators_part_is_in_each_pod_of_a_kind(tmp_path: Path) -> None:
    pod_values = {
        "labels": {"team": "rl", "slipstream.dev/run": "another"},
        "annotations": {"a.example.com/b": "c"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu-pool", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "training",
        "serviceAccountName": "reads-buckets",
        **DATASETS,
        "env": [{"name": "CACHE", "value": "/data"}],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    }
    pods = by_worker(
        build(tmp_path, *values(kinds={"trainer": {"pod": pod_values}}), profiles=("multi-node",))
    )
    trainer, rollout = pods["trainer-0"], pods["rollout-0"]
    spec, metadata = trainer["spec"], trainer["metadata"]
    assert metadata["labels"]["team"] == "rl"
    assert metadata["labels"]["slipstream.dev/run"] == "run_0198", "the controller's labels win"
    assert metadata["annotations"]["a.example.com/b"] == "c"
    assert spec["nodeSelector"].items() >= {"gpu": "h200"}.items()
    assert [toleration["key"] for toleration in spec["tolerations"]] == [
        "nvidia.com/gpu",
        "gpu-pool",
    ]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("training", "reads-buckets")
    (container,) = spec["containers"]
    assert DATASETS["volumeMounts"][0] in container["volumeMounts"]
    assert {"name": "CACHE", "value": "/data"} in container["env"]
    (fetch,) = spec["initContainers"]
    assert fetch["securityContext"] == container["securityContext"], "as the namespace demands"
    assert "initContainers" not in rollout["spec"]
    assert "datasets" not in json.dumps(rollout)
    for pod in pods.values():
        assert "resources-of-kinds" not in str(pod["metadata"]["annotations"])
        validate_manifest(pod, "1.33")


def test_a_run_chooses_within_the_bounds(tmp_path: Path) -> None:
    arguments = values(overrides=OVERRIDES)
    pods = by_worker(
        build(tmp_path, *arguments, profiles=("multi-node",), pods={"rollout": CHOSEN})
    )
    rollout, trainer = pods["rollout-0"], pods["trainer-0"]
    assert sizes(rollout) == ("8", "300Gi", "300Gi", "40Gi")
    assert sizes(trainer) != sizes(rollout)
    (container,) = rollout["spec"]["containers"]
    assert container["resources"]["requests"]["ephemeral-storage"] == "500Gi"
    assert rollout["spec"]["nodeSelector"]["zone"] == "a"
    assert {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"} in (
        rollout["spec"]["tolerations"]
    )
    assert rollout["spec"]["priorityClassName"] == "batch"
    assert rollout["metadata"]["annotations"].items() >= CHOSEN["annotations"].items()
    assert DATASETS["volumes"][0] in rollout["spec"]["volumes"]
    (proxy,) = rollout["spec"]["initContainers"]
    assert (proxy["name"], proxy["restartPolicy"]) == ("proxy", "Always")
    for pod in pods.values():
        validate_manifest(pod, "1.33")


def read(folder: Path, overrides: dict[str, Any] | None) -> Overrides:
    if overrides is not None:
        (folder / "overrides.yaml").write_text(json.dumps(overrides))
    return Overrides.read(folder)


def spec_of(kind: str, **chosen: Any):
    return spec_with(**SMALL, pods={kind: chosen})


@pytest.mark.parametrize(
    ("chosen", "key", "value"),
    [
        ({"memory": "513Gi"}, "memory", "max.memory"),
        ({"cpu": "33000m"}, "cpu", "max.cpu"),
        ({"shared_memory": "65Gi"}, "shared_memory", "max.sharedMemory"),
        ({"ephemeral_storage": "2Ti"}, "ephemeral_storage", "max.ephemeralStorage"),
        ({"node_selector": {"kubernetes.io/hostname": "n1"}}, "node_selector", "nodeSelector"),
        ({"tolerations": [{"key": "other", "operator": "Exists"}]}, "tolerations", "tolerations"),
        ({"annotations": {"k8s.v1.cni.cncf.io/networks": "x"}}, "annotations", "annotations"),
        ({"priority_class": "system-node-critical"}, "priority_class", "priorityClasses"),
        ({"templates": ["host-path"]}, "templates", "templates"),
    ],
)
@pytest.mark.parametrize("has_bounds", [True, False])
def test_what_is_not_allowed_is_refused_with_the_key_and_the_fix(
    tmp_path: Path, chosen: dict[str, Any], key: str, value: str, has_bounds: bool
) -> None:
    overrides = read(tmp_path, OVERRIDES if has_bounds else None)
    (problem,) = overrides.problems(spec_of("rollout", **chosen))
    assert problem.startswith(f"pods.rollout.{key}: ")
    assert f"workers.overrides.{value}" in problem
    assert "lower it" in problem or "remove" in problem


@pytest.mark.parametrize("key", ["cpu", "memory", "shared_memory", "ephemeral_storage"])
@pytest.mark.parametrize("amount", [0, "0Gi", "0.000"])
def test_an_amount_of_zero_would_be_without_a_limit_and_is_refused(
    tmp_path: Path, key: str, amount: int | str
) -> None:
    (problem,) = read(tmp_path, OVERRIDES).problems(spec_of("rollout", **{key: amount}))
    assert problem.startswith(f"pods.rollout.{key}: expected more than 0")


def test_annotations_of_the_controller_are_never_a_runs_to_choose(tmp_path: Path) -> None:
    overrides = read(tmp_path, {"annotations": ["slipstream.dev/"]})
    chosen = {"annotations": {"slipstream.dev/gpu-resource": "x"}}
    (problem,) = overrides.problems(spec_of("rollout", **chosen))
    assert "controller's" in problem


def test_a_pod_that_exceeds_lowered_bounds_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"pods\.rollout\.memory"):
        build(tmp_path, profiles=("multi-node",), pods={"rollout": {"memory": "1Gi"}})


@pytest.mark.parametrize(
    ("pods", "key"),
    [
        ({"rollot": {}}, "rollot"),
        ({"rollout": {"memory": "many"}}, "pods.rollout.memory"),
        ({"rollout": {"hostNetwork": True}}, "pods.rollout.hostNetwork"),
        ({"rollout": {"volumes": []}}, "pods.rollout.volumes"),
        ({"rollout": {"service_account": "admin"}}, "pods.rollout.service_account"),
    ],
)
def test_a_specification_has_no_other_keys_of_pods(pods: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match=key):
        spec_with(**SMALL, pods=pods)


def test_a_kind_without_workers_is_named() -> None:
    (problem,) = pod_problems(spec_of("critic", cpu="2"))
    assert problem.startswith("pods.critic: ")
    assert "trainer, rollout" in problem


def test_a_part_must_not_replace_a_volume_of_the_pod(tmp_path: Path) -> None:
    pod_values = {"volumes": [{"name": "tmp", "emptyDir": {}}]}
    with pytest.raises(
        FailedPreconditionError, match=r"workers\.kinds\.trainer\.pod\.volumes.*tmp"
    ):
        build(tmp_path, *values(kinds={"trainer": {"pod": pod_values}}), profiles=("multi-node",))


def test_workers_of_one_pod_keep_the_init_containers_of_all(tmp_path: Path) -> None:
    kinds = {
        kind: {"pod": {"initContainers": [{"name": f"for-{kind}", "image": "a:1"}]}}
        for kind in ("trainer", "rollout")
    }
    arguments = (*values(kinds=kinds), "--set", "workers.topology=bundled")
    (pod,) = build(tmp_path, *arguments, profiles=("multi-node",), trainer={"world_size": 1})
    assert [container["name"] for container in pod["spec"]["initContainers"]] == [
        "for-trainer",
        "for-rollout",
    ]


@pytest.mark.parametrize(
    "pod_values", [{"hostNetwork": True}, {"containers": [{"name": "a"}]}, {"securityContext": {}}]
)
def test_the_chart_knows_every_key_of_a_part(pod_values: dict[str, Any]) -> None:
    result = helm("template", "demo", str(CHART), *values(kinds={"trainer": {"pod": pod_values}}))
    assert result.returncode != 0
    assert next(iter(pod_values)) in result.stderr
