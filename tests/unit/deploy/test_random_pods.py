"""Tests that the pods of random runs are whole or refused with a key, in installations of several kinds."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from services.common.errors import FailedPreconditionError
from services.common.runspec.keys import flat
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import total_gpus
from services.extras.kubernetes import gang, job_set
from services.extras.kubernetes.pod_resources import more
from services.extras.kubernetes.pod_rules import pod_problems
from services.extras.kubernetes.worker_pods import (
    Pod,
    WorkerTemplates,
    build_pods,
    load_templates,
)
from tests.helpers.chart import one, render
from tests.helpers.manifests import validate_manifest
from tests.helpers.specs import spec_with
from tests.unit.deploy.test_worker_pods import OWNER
from tests.unit.extras.kubernetes.test_pod_rules import documents, named_key

GPU = "nvidia.com/gpu"
BASE = {"cpu": "4", "memory": "32Gi"}
"""Requests of every kind of worker without those for its GPUs."""
PER_GPU = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
CRITIC = {"requests": {"cpu": "1", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
PROXY = {"initContainers": [{"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}]}
DATASETS = {
    "volumes": [{"name": "datasets", "persistentVolumeClaim": {"claimName": "datasets"}}],
    "volumeMounts": [{"name": "datasets", "mountPath": "/data", "readOnly": True}],
}
OVERRIDES = {
    "max": {"cpu": "32", "memory": "512Gi"},
    "nodeSelector": ["zone"],
    "templates": {"datasets": DATASETS},
}
KINDS = {"trainer": {"pod": PROXY}, "critic": {"perGpu": CRITIC}}
RUN = "run_0198"

INSTALLATIONS = {
    "plain": (),
    "gang": ("--set", "workers.gang.scheduler=volcano"),
    "queue": ("--set", "workers.kueue.queueName=training"),
    "job set": ("--set", "workers.jobSet.enabled=true"),
    "bundled": ("--set", "workers.topology=bundled"),
}


class Case(NamedTuple):
    """Templates of an installation, and what it adds to pods."""

    name: str
    templates: WorkerTemplates


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Case]:
    installed = {}
    for name, options in INSTALLATIONS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        values = {"workers.overrides": OVERRIDES, "workers.kinds": KINDS}
        values |= {f"{program}.perGpu": PER_GPU for program in ("trainer", "rollout")}
        values |= {f"{program}.resources": {"requests": BASE} for program in ("trainer", "rollout")}
        texts = [
            text
            for key, value in values.items()
            for text in ("--set-json", f"{key}={json.dumps(value)}")
        ]
        config = one(render(*texts, *options), "ConfigMap", "demo-slipstream-workers")
        for file, text in config["data"].items():
            (folder / file).write_text(text, encoding="utf-8")
        installed[name] = Case(name, load_templates(folder))
    return installed


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from((2, 32, 64)),
        "memory": st.sampled_from(("100Gi", "512Gi", "1Ti")),
        "node_selector": st.sampled_from(({"zone": "a"}, {"rack": "b"})),
        "templates": st.sampled_from((["datasets"], ["unknown"])),
    },
)
# Most choices are within the bounds, because one that is not ends a case early.
ALLOWED = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from((2, 32)),
        "memory": st.sampled_from(("100Gi", "512Gi")),
        "node_selector": st.just({"zone": "a"}),
        "templates": st.just(["datasets"]),
    },
)
PODS = st.dictionaries(
    st.sampled_from(("trainer", "rollout", "critic")),
    st.one_of(ALLOWED, ALLOWED, CHOICES),
    max_size=2,
)


@settings(max_examples=500, deadline=None)
@given(document=documents(), chosen=PODS, name=st.sampled_from([*INSTALLATIONS]))
def test_the_pods_of_a_random_run_are_whole_or_the_refusal_names_a_key(
    cases: Mapping[str, Case], document: dict[str, Any], chosen: dict[str, Any], name: str
) -> None:
    case = cases[name]
    tasks = document.get("topology", {}).get("task_groups", ())
    chosen = {kind: pod for kind, pod in chosen.items() if kind != "critic" or "critic" in tasks}
    try:
        spec = spec_with(**document, pods=chosen)
    except SpecError as error:
        note(str(error))
        return
    templates = case.templates
    problems = [*pod_problems(spec, templates.topology), *templates.overrides.problems(spec)]
    try:
        pods = build_pods(templates, RUN, spec, controller_address="c:50051", owner=OWNER)
    except FailedPreconditionError as error:
        assert str(error) == "\n".join(problems)
        keys = {*dict(flat(spec.model_dump())), *(f"pods.{kind}" for kind in chosen)}
        for problem in problems:
            key = named_key(problem)
            assert key in keys or any(key.startswith(f"pods.{kind}.") for kind in chosen), problem
        return
    assert not problems
    names = [pod["metadata"]["name"] for pod in pods]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 63
    for pod in pods[:1] + pods[-1:]:
        validate_manifest(pod, "1.33")
    assert sum(sum_of(pod, GPU) for pod in pods) == total_gpus(spec)
    assert all(sum_of(pod, GPU) <= spec.topology.gpus_per_node for pod in pods)
    assert_amounts(pods, spec, chosen)
    assert_groups(case, pods)


def sum_of(pod: Pod, resource: str) -> int:
    requests = [item["resources"].get("requests", {}) for item in pod["spec"]["containers"]]
    return sum(int(parse_quantity(request.get(resource, "0"))) for request in requests)


def assert_amounts(pods: list[Pod], spec: RunSpec, chosen: dict[str, Any]) -> None:
    """Asserts that each worker has what its kind, its GPUs and the run's choices give it."""
    for pod in pods:
        for index, container in enumerate(pod["spec"]["containers"]):
            role, _, _ = container["name"].rpartition("-")
            requests = container["resources"]["requests"]
            choice = spec.pods.get(role)
            is_shared = spec.is_colocated(container["name"])
            # A rollout on the trainer's GPUs asks for none of them, but for processors.
            num_gpus = spec.engine_gpus if is_shared else int(requests.get(GPU, 0))
            added = CRITIC if role == "critic" else PER_GPU
            for resource in ("cpu", "memory"):
                amount = more(BASE[resource], added["requests"][resource], times=num_gpus)
                quantity = None if choice is None else getattr(choice, resource)
                expected = amount if quantity is None else str(quantity)
                assert parse_quantity(requests[resource]) == parse_quantity(expected), role
            if choice is not None and choice.templates:
                assert "datasets" in [volume["name"] for volume in pod["spec"]["volumes"]]
                assert "/data" in [mount["mountPath"] for mount in container["volumeMounts"]]
            if choice is not None and index == 0 and choice.node_selector:
                assert pod["spec"]["nodeSelector"]["zone"] == "a"
        workers = [container["name"] for container in pod["spec"]["containers"]]
        inits = [container["name"] for container in pod["spec"].get("initContainers", ())]
        assert inits == ["proxy"] * ("trainer-0" in workers)


def assert_groups(case: Case, pods: list[Pod]) -> None:
    """Asserts that the pods of a run are placed together where the installation says so."""
    templates, group = case.templates, gang.group_name(RUN)
    for pod in pods:
        annotations, labels = pod["metadata"]["annotations"], pod["metadata"]["labels"]
        if case.name == "gang":
            assert annotations["scheduling.k8s.io/group-name"] == group
            assert pod["spec"]["schedulerName"] == "volcano"
        if case.name == "queue":
            assert labels["kueue.x-k8s.io/pod-group-name"] == group
            assert annotations["kueue.x-k8s.io/pod-group-total-count"] == str(len(pods))
    if templates.pod_group is not None:
        pod_group = gang.build_pod_group(templates.pod_group, RUN, num_pods=len(pods), owner=OWNER)
        assert pod_group["spec"]["minMember"] == len(pods)
    sets = {job_set.name_of(pod) for pod in pods} - {""}
    assert not sets or case.name == "job set"
    for name in sets:
        members = [pod for pod in pods if job_set.name_of(pod) == name]
        assert templates.job_set is not None
        (job,) = job_set.build_job_set(templates.job_set, members)["spec"]["replicatedJobs"]
        assert job["template"]["spec"]["parallelism"] == len(members) > 1
        assert job["template"]["spec"]["template"]["spec"] == members[0]["spec"]
