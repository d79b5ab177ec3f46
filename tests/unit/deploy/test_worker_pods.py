"""Tests of the pods that the controller creates from the chart's templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import FailedPreconditionError
from services.extras.kubernetes import gang, job_set
from services.extras.kubernetes.pod_resources import more
from services.extras.kubernetes.worker_pods import (
    Pod,
    accounting_labels,
    build_pods,
    load_templates,
    used_ports,
    why_volatile,
)
from tests.helpers.chart import one, render, worker_templates
from tests.helpers.manifests import validate_manifest
from tests.helpers.packages import install_role
from tests.helpers.specs import spec_with

SMALL = {
    "data": {"train": {"source": "python", "path": "sort4.py:train"}},
    "rollout": {"replicas": 2},
    "trainer": {"prompts_per_step": 1},
}
OWNER = {"apiVersion": "v1", "kind": "Service", "name": "workers", "uid": "u1"}


def build(
    folder: Path, *values: str, profiles: tuple[str, ...], **sections: dict[str, Any]
) -> list[Pod]:
    """Returns the pods of a run with the given changes to sections of its specification."""
    config = one(render(*values, profiles=profiles), "ConfigMap", "demo-slipstream-workers")
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    changed = {name: {**SMALL.get(name, {}), **section} for name, section in sections.items()}
    return build_pods(
        load_templates(folder),
        "run_0198",
        spec_with(**{**SMALL, **changed}),
        controller_address="c:50051",
        owner=OWNER,
    )


def gpus(pod: Pod) -> list[str]:
    """Returns the requested number of GPUs of each container of a pod."""
    counts = []
    for container in pod["spec"]["containers"]:
        resources = container["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
        counts.append(resources["limits"]["nvidia.com/gpu"])
    return counts


def sizes(pod: Pod) -> tuple[str, str, str, str]:
    """Returns requested processors and memory, the limit of memory, and the size of /dev/shm."""
    (container,) = pod["spec"]["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    (shm,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    return requests["cpu"], requests["memory"], limits["memory"], shm["emptyDir"]["sizeLimit"]


def test_processors_and_memory_follow_the_gpus_of_a_pod(tmp_path: Path) -> None:
    pods = build(
        tmp_path,
        profiles=("multi-node",),
        rollout={"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}},
        algorithm={"kl": {"coefficient": 0.1}},
        topology={
            "task_groups": ["train", "ref_logp", "generate"],
            "ratios": [0.5, 0.25, 0.25],
            "gpus": 16,
        },
    )
    by_worker = {pod["spec"]["containers"][0]["name"]: sizes(pod) for pod in pods}
    assert by_worker["trainer-0"] == ("32", "512Gi", "1Ti", "34Gi")
    assert by_worker["ref-logp-0"] == ("4", "64Gi", "128Gi", "6Gi")
    assert by_worker["rollout-0"] == ("8", "64Gi", "128Gi", "10Gi")
    assert all("resources-per-gpu" not in str(pod["metadata"]["annotations"]) for pod in pods)
    for pod in pods:
        validate_manifest(pod, "1.33")


def test_a_kind_of_worker_may_have_its_own_resources(tmp_path: Path) -> None:
    kinds = {
        "ref_logp": {
            "resources": {"requests": {"cpu": "2", "memory": "24Gi"}, "limits": {"memory": "48Gi"}},
            "perGpu": {"requests": {"cpu": "500m"}},
        }
    }
    pods = build(
        tmp_path,
        "--set-json",
        f"workers.kinds={json.dumps(kinds)}",
        profiles=("multi-node",),
        algorithm={"kl": {"coefficient": 0.1}},
        topology={
            "task_groups": ["train", "ref_logp", "generate"],
            "ratios": [0.5, 0.25, 0.25],
            "gpus": 8,
        },
    )
    by_worker = {pod["spec"]["containers"][0]["name"]: sizes(pod) for pod in pods}
    assert by_worker["ref-logp-0"] == ("2500m", "24Gi", "48Gi", "2Gi")
    assert by_worker["trainer-0"] == ("16", "256Gi", "512Gi", "18Gi")


def test_without_amounts_per_gpu_resources_stay_those_of_the_values(tmp_path: Path) -> None:
    for pod in build(tmp_path, profiles=(), trainer={"world_size": 4}):
        assert sizes(pod) == ("4", "32Gi", "64Gi", "2Gi")


@pytest.mark.parametrize(
    ("quantity", "added", "times", "total"),
    [
        ("16Gi", "64Gi", 8, "528Gi"),
        ("512Gi", "512Gi", 1, "1Ti"),
        ("0", "4", 8, "32"),
        ("4", "500m", 3, "5500m"),
        ("100Mi", "1", 5, "104857605"),
        ("2Gi", "4Gi", 0, "2Gi"),
    ],
)
def test_quantities_are_added_as_kubernetes_reads_them(
    quantity: str, added: str, times: int, total: str
) -> None:
    assert more(quantity, added, times=times) == total


def test_labels_of_project_and_user_are_valid() -> None:
    labels = accounting_labels(project="team-a", user="https://id/ann@example.com" + 80 * "x")
    assert labels["slipstream.dev/project"] == "team-a"
    assert labels["slipstream.dev/user"].startswith("https---id-ann-example.com")
    assert len(labels["slipstream.dev/user"]) == 63
    assert accounting_labels(project="team-a", user="@") == {"slipstream.dev/project": "team-a"}


def environment(container: Pod) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container["env"]}


@pytest.mark.parametrize(
    "profiles", [("cpu-smoke",), ("one-gpu-node",), ("multi-node", "rdma")], ids="+".join
)
def test_pods_fit_the_schema_of_kubernetes_and_end_with_their_owner(
    tmp_path: Path, profiles: tuple[str, ...]
) -> None:
    for pod in build(tmp_path, profiles=profiles):
        validate_manifest(pod, "1.35")
        assert pod["metadata"]["ownerReferences"] == [OWNER]
        assert pod["metadata"]["labels"]["slipstream.dev/run"] == "run_0198"
        assert pod["spec"]["restartPolicy"] == "Never"


def test_separate_workers_learn_who_they_are(tmp_path: Path) -> None:
    pods = build(tmp_path, profiles=("multi-node",))
    assert [pod["metadata"]["name"] for pod in pods] == [
        "run-0198-trainer-0",
        "run-0198-rollout-0",
        "run-0198-rollout-1",
    ]
    trainer = environment(pods[0]["spec"]["containers"][0])
    assert trainer["SLIPSTREAM_TRAINER_RUN_ID"] == "run_0198"
    assert trainer["SLIPSTREAM_TRAINER_WORKER_ID"] == "trainer-0"
    assert trainer["SLIPSTREAM_TRAINER_CONTROLLER_ADDRESS"] == "c:50051"
    assert trainer["SLIPSTREAM_TRAINER_BIND"] == "$(POD_IP):50051"
    assert environment(pods[2]["spec"]["containers"][0])["SLIPSTREAM_ROLLOUT_WORKER_ID"] == (
        "rollout-1"
    )


@pytest.mark.parametrize("profile", ["multi-node", "one-gpu-node"])
def test_pods_mount_the_certificate_of_their_run_and_not_its_token(
    tmp_path: Path, profile: str
) -> None:
    for pod in build(tmp_path, profiles=(profile,)):
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        assert volume["secret"]["secretName"] == "run-0198-identity"
        names = {item["key"] for item in volume["secret"]["items"]}
        assert names == {"tls.crt", "tls.key", "ca.crt"}
    for pod in build(tmp_path, "--set", "tls.mode=off", profiles=(profile,)):
        assert "tls" not in {volume["name"] for volume in pod["spec"]["volumes"]}


def test_roles_of_their_own_get_pods_of_the_trainers_program(tmp_path: Path) -> None:
    groups = {
        "task_groups": ["train", "ref_logp", "generate"],
        "ratios": [0.5, 0.25, 0.25],
        "gpus": 8,
    }
    pods = build(
        tmp_path,
        profiles=("multi-node",),
        algorithm={"kl": {"coefficient": 0.1}},
        rollout={"replicas": 1, "engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}},
        topology=groups,
    )
    names = [pod["metadata"]["name"].removeprefix("run-0198-") for pod in pods]
    assert names == ["trainer-0", "rollout-0", "ref-logp-0", "ref-logp-1"]
    assert [gpus(pod) for pod in pods] == [["4"], ["2"], ["1"], ["1"]]
    validate_manifest(pods[2], "1.35")
    (container,) = pods[2]["spec"]["containers"]
    assert environment(container)["SLIPSTREAM_TRAINER_ROLE"] == "ref_logp"
    assert "--nproc-per-node=4" in pods[0]["spec"]["containers"][0]["command"]


def test_a_sharded_reference_is_one_pod_with_all_its_ranks(tmp_path: Path) -> None:
    pods = build(
        tmp_path,
        profiles=("multi-node",),
        algorithm={"kl": {"coefficient": 0.1}},
        rollout={"replicas": 2},
        topology={
            "task_groups": ["train", "ref_logp", "generate"],
            "ratios": [0.25, 0.5, 0.25],
            "gpus": 8,
            "scoring_ranks": 4,
        },
    )
    (pod,) = [pod for pod in pods if "ref-logp" in pod["metadata"]["name"]]
    validate_manifest(pod, "1.35")
    assert gpus(pod) == ["4"]
    (container,) = pod["spec"]["containers"]
    assert environment(container)["SLIPSTREAM_TRAINER_ROLE"] == "ref_logp"
    assert container["command"][-3:] == ["--nproc-per-node=4", "-m", "services.trainer"]


def test_workers_are_ready_once_they_say_so(tmp_path: Path) -> None:
    (pod,) = build(tmp_path, profiles=("one-gpu-node",))
    files = set()
    for container in pod["spec"]["containers"]:
        (file,) = [v for k, v in environment(container).items() if k.endswith("_READY_FILE")]
        assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", file]
        files.add(file)
    assert len(files) == 3


def test_a_queue_admits_the_pods_of_a_run_together(tmp_path: Path) -> None:
    pods = build(tmp_path, "--set", "workers.kueue.queueName=gpus", profiles=("multi-node",))
    roles = []
    for pod in pods:
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert labels["kueue.x-k8s.io/pod-group-name"] == "run-0198"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "3"
        assert annotations["kueue.x-k8s.io/pod-group-serving"] == "true"
        roles.append(annotations["kueue.x-k8s.io/role-hash"])
    assert roles == ["trainer", "rollout", "rollout"]
    (plain, *_) = build(tmp_path, profiles=("multi-node",))
    assert not [label for label in plain["metadata"]["labels"] if "kueue" in label]


def test_rollouts_leave_the_slots_of_a_queue_to_workers_that_a_run_cannot_lack(
    tmp_path: Path,
) -> None:
    groups = {
        "task_groups": ["train", "ref_logp", "generate"],
        "ratios": [0.5, 0.25, 0.25],
        "gpus": 4,
    }
    pods = build(
        tmp_path,
        *("--set", "workers.kueue.queueName=gpus"),
        profiles=("multi-node",),
        algorithm={"kl": {"coefficient": 0.1}},
        rollout={"replicas": 1},
        topology=groups,
    )
    assert gang.join_kueue_slots(pods, size=3, num_members=1) == 3
    group_by_pod = {
        pod["metadata"]["name"]: pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
        for pod in pods
    }
    extra = "run-0198-rollout-0"
    members = dict.fromkeys(("run-0198-trainer-0", "run-0198-ref-logp-0"), "run-0198")
    assert group_by_pod == members | {extra: extra}


def test_bundled_workers_ask_for_their_gpus_in_one_pod(tmp_path: Path) -> None:
    (pod,) = build(tmp_path, profiles=("one-gpu-node",), trainer={"world_size": 2})
    assert gpus(pod) == ["2", "1", "1"]


def test_workers_on_the_cpu_ask_for_no_gpu(tmp_path: Path) -> None:
    for pod in build(tmp_path, profiles=("cpu-smoke",), trainer={"world_size": 2}):
        for section in ("requests", "limits"):
            assert set(pod["spec"]["containers"][0]["resources"][section]) <= {
                "cpu",
                "memory",
                "ephemeral-storage",
            }


def test_several_trainer_processes_start_by_torchrun(tmp_path: Path) -> None:
    pods = build(tmp_path, profiles=("multi-node",), trainer={"world_size": 8})
    assert gpus(pods[0]) == ["8"]
    command = pods[0]["spec"]["containers"][0]["command"]
    assert command == ["torchrun", "--standalone", "--nproc-per-node=8", "-m", "services.trainer"]
    assert "command" not in pods[1]["spec"]["containers"][0]


def test_a_trainer_of_more_ranks_than_a_node_has_gpus_is_a_set_of_pods(tmp_path: Path) -> None:
    pods = build(tmp_path, profiles=("multi-node",), trainer={"world_size": 16})
    first, second, *_ = pods
    assert len(pods) == 4
    assert [pod["metadata"]["name"] for pod in (first, second)] == [
        "run-0198-trainer-0",
        "run-0198-trainer-0-node-1",
    ]
    for rank, pod in enumerate((first, second)):
        validate_manifest(pod, "1.35")
        assert gpus(pod) == ["8"]
        (container,) = pod["spec"]["containers"]
        assert container["name"] == "trainer-0"
        assert container["command"][1:6] == [
            "--nnodes=2",
            f"--node-rank={rank}",
            "--master-addr=run-0198-trainer-0.demo-slipstream-workers",
            "--master-port=29500",
            "--nproc-per-node=8",
        ]
    assert "ports" in first["spec"]["containers"][0]
    assert "ports" not in second["spec"]["containers"][0], "only the first rank serves"
    assert pods[0]["spec"]["hostname"] == "run-0198-trainer-0"
    service = one(render(), "Service", "demo-slipstream-workers")["spec"]
    assert service["selector"].items() <= first["metadata"]["labels"].items()


def test_a_trainer_of_several_nodes_is_one_indexed_job_of_a_job_set_where_asked(
    tmp_path: Path,
) -> None:
    placement = (
        "workers.jobSet.annotations.alpha\\.jobset\\.sigs\\.k8s\\.io/exclusive-topology=rack"
    )
    pods = build(
        tmp_path,
        *("--set", "workers.jobSet.enabled=true", "--set", placement),
        profiles=("multi-node",),
        trainer={"world_size": 16},
    )
    template = load_templates(tmp_path).job_set
    assert template is not None
    body = job_set.build_job_set(template, [pod for pod in pods if job_set.name_of(pod)])
    metadata = body["metadata"]
    assert (metadata["name"], metadata["namespace"]) == (
        "run-0198-trainer-0",
        "train-workers",
    )
    assert metadata["ownerReferences"] == [OWNER]
    assert metadata["labels"]["slipstream.dev/run"] == "run_0198"
    assert metadata["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"}
    (job,) = body["spec"]["replicatedJobs"]
    validate_manifest(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]},
        "1.35",
    )
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (1, 2)
    pod = job["template"]["spec"]["template"]
    assert "hostname" not in pod["spec"], "its Job gives it one"
    (container,) = pod["spec"]["containers"]
    assert container["command"][1:4] == [
        "--nnodes=2",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=run-0198-trainer-0-node-0-0.demo-slipstream-workers",
    ]
    assert "readinessProbe" not in container
    assert [job_set.name_of(pod) for pod in pods[2:]] == ["", ""], "rollouts come and go"


@pytest.mark.parametrize(
    "values",
    [
        "workers.kueue.queueName=gpus",
        "workers.gang.scheduler=volcano",
        "workers.jobSet.enabled=true",
        "workers.hostNetwork=true",
    ],
)
def test_three_nodes_of_pipeline_stages_are_one_gang_whose_ranks_meet_at_a_stable_name(
    tmp_path: Path, values: str
) -> None:
    """One stage of eight ranks on each node; JobSets and pods that are ungrouped are ended together, too."""
    stages = {"engine": "stages", "pipeline_parallel": 3, "tensor_parallel": 2}
    pods = build(
        tmp_path,
        *("--set", values),
        profiles=("multi-node",),
        trainer={"world_size": 24, **stages},
        rollout={"replicas": 1},
    )
    *nodes, rollout = pods
    assert [gpus(pod) for pod in pods] == [["8"], ["8"], ["8"], ["1"]]
    templates = load_templates(tmp_path)
    begins = set()
    for number, pod in enumerate(nodes):
        validate_manifest(pod, "1.35")
        (container,) = pod["spec"]["containers"]
        assert container["name"] == "trainer-0", "the loss of any pod ends the worker"
        _, nnodes, rank, address, port, processes, *_ = container["command"]
        assert (nnodes, processes) == ("--nnodes=3", "--nproc-per-node=8")
        assert rank in {f"--node-rank={number}", f"--node-rank={job_set.NODE_RANK}"}
        begins.add((address, port))
        assert pod["spec"]["subdomain"] == "demo-slipstream-workers"
    ((address, _),) = begins
    if templates.job_set is not None:
        body = job_set.build_job_set(templates.job_set, nodes)
        (job,) = body["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (
            3,
            3,
            "Indexed",
        )
        assert (spec["backoffLimit"], body["spec"]["failurePolicy"]["maxRestarts"]) == (0, 0)
        host = job_set.hostname(templates.job_set, "run-0198-trainer-0", 0)
    else:
        host = nodes[0]["spec"]["hostname"]
    assert address == f"--master-addr={host}.demo-slipstream-workers"
    if "kueue" in values:
        group, total = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
        for pod in (*nodes, rollout):
            metadata = pod["metadata"]
            assert (metadata["labels"][group], metadata["annotations"][total]) == ("run-0198", "4")
    if templates.pod_group is not None:
        body = gang.build_pod_group(templates.pod_group, "run_0198", num_pods=4, owner=OWNER)
        assert body["spec"]["minMember"] == 4


def test_workers_of_one_node_are_plain_pods(tmp_path: Path) -> None:
    for topology in ("separate", "bundled"):
        values = f"workers.jobSet.enabled=true,workers.topology={topology}"
        pods = build(tmp_path, "--set", values, profiles=("multi-node",), trainer={"world_size": 6})
        assert not any(job_set.name_of(pod) for pod in pods)


def test_ranks_that_do_not_fill_their_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"trainer\.world_size.*gpus_per_node \(8\)"):
        build(tmp_path, profiles=("multi-node",), trainer={"world_size": 12})


@pytest.mark.parametrize(
    ("folder", "is_kept"),
    [
        ("/var/lib/slipstream/run_01/checkpoints", True),
        ("/var/lib/slipstream", True),
        ("/var/lib/slipstream-other", False),  # of the container's own file system
        ("/var/lib/slipstream/../checkpoints", False),
        ("/tmp/../var/lib//slipstream/./run_01", True),
        ("//var/lib/slipstream/run_01", True),
        ("checkpoints", False),
        ("/tmp/checkpoints", False),
    ],
)
def test_a_folder_outlives_its_pod_if_a_claim_holds_it(folder: str, is_kept: bool) -> None:
    scratch = worker_templates(render())["trainer"]
    assert why_volatile(scratch, folder)
    claim = "workers.checkpoints.existingClaim=checkpoints"
    template_with_claim = worker_templates(render("--set", claim))["trainer"]
    assert (why_volatile(template_with_claim, folder) == "") == is_kept


def test_a_volume_that_the_administrator_adds_to_trainers_outlives_their_pods() -> None:
    pod_values = {
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    kinds = json.dumps({"trainer": {"pod": pod_values}})
    template = worker_templates(render("--set-json", f"workers.kinds={kinds}"))["trainer"]
    assert why_volatile(template, "/shared/run") == ""
    assert why_volatile(template, "/var/lib/slipstream")


def test_an_object_store_outlives_every_pod() -> None:
    assert why_volatile(worker_templates(render())["trainer"], "s3://bucket/run") == ""


def numbers(pods: list[Pod]) -> list[int]:
    """Returns all ports that pods listen on or meet at."""
    ports = []
    for container in (
        container_of_pod for pod in pods for container_of_pod in pod["spec"]["containers"]
    ):
        ports += [port["containerPort"] for port in container.get("ports", ())]
        command = container.get("command", ())
        ports += [
            int(argument.partition("=")[2]) for argument in command if "--master-port=" in argument
        ]
    return ports


@pytest.mark.parametrize("topology", ["separate", "bundled"])
def test_runs_on_the_network_of_a_node_have_different_ports(tmp_path: Path, topology: str) -> None:
    values = ("--set", f"workers.hostNetwork=true,workers.topology={topology}")
    config = one(render(*values), "ConfigMap", "demo-slipstream-workers")
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    templates = load_templates(tmp_path)
    nodes = {"gpus_per_node": 8 if topology == "separate" else 64}
    spec = spec_with(**SMALL, topology=nodes)
    spec = spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update={"replicas": 12}),
            "trainer": spec.trainer.model_copy(update={"world_size": 16}),
        }
    )
    existing: list[Pod] = []
    for number in range(40):
        pods = build_pods(
            templates,
            f"run_{number}",
            spec,
            controller_address="c:50051",
            owner=OWNER,
            ports_in_use=used_ports(existing),
        )
        for pod in pods:
            validate_manifest(pod, "1.35")
        shared = set(numbers(pods)) & set(numbers(existing))
        assert not shared
        assert all(20_000 <= port < 29_500 for port in numbers(pods))
        existing += pods
    # A run that is started again by another controller does not take the ports of its pods.
    again = build_pods(
        templates,
        "run_0",
        spec,
        controller_address="c",
        owner=OWNER,
        ports_in_use=used_ports(existing),
    )
    assert set(numbers(again)).isdisjoint(numbers(existing))


def test_pods_with_a_network_of_their_own_keep_the_usual_ports(tmp_path: Path) -> None:
    first, *_ = build(tmp_path, profiles=("multi-node",), trainer={"world_size": 16})
    assert numbers([first]) == [50051, 9090, 29500]
    assert not used_ports([first])


def test_missing_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="mount the chart's ConfigMap"):
        load_templates(tmp_path)


def test_a_kind_of_worker_that_is_added_gets_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"tasks": ("prm",), "serve": "prm:serve_prm", "scores": "batches"}
    install_role(tmp_path, monkeypatch, "prm", **keys)
    topology = {
        "task_groups": [["train"], ["generate"], ["prm"]],
        "ratios": [0.25, 0.5, 0.25],
        "gpus": 4,
    }
    *_, pod = build(tmp_path, profiles=("multi-node",), topology=topology)
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "prm-0"
    assert environment(container)["SLIPSTREAM_TRAINER_ROLE"] == "prm"
    assert gpus(pod) == ["1"]


@pytest.mark.parametrize(
    ("scheduler", "kind", "name"),
    [
        ("volcano", "scheduling.volcano.sh/v1beta1", "volcano"),
        ("kai", "scheduling.run.ai/v2alpha2", "kai-scheduler"),
        ("coscheduling", "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler"),
        ("native", "scheduling.k8s.io/v1alpha2", None),
    ],
)
def test_pods_of_a_run_are_one_group_of_a_gang_scheduler(
    tmp_path: Path, scheduler: str, kind: str, name: str | None
) -> None:
    values = ("--set", f"workers.gang.scheduler={scheduler},workers.gang.queueName=gpus")
    pods = build(tmp_path, *values, profiles=("multi-node",))
    for pod in pods:
        metadata, spec = pod["metadata"], pod["spec"]
        references = [
            metadata["annotations"].get("scheduling.k8s.io/group-name"),
            metadata["annotations"].get("pod-group-name"),
            metadata["labels"].get("scheduling.x-k8s.io/pod-group"),
            spec.get("schedulingGroup", {}).get("podGroupName"),
        ]
        assert [reference for reference in references if reference] == ["run-0198"]
        assert spec.get("schedulerName") == name
        if scheduler != "native":
            validate_manifest(pod, "1.35")
    template = load_templates(tmp_path).pod_group
    assert template is not None
    group = gang.build_pod_group(template, "run_0198", num_pods=len(pods), owner=OWNER)
    assert (group["apiVersion"], group["metadata"]["name"]) == (kind, "run-0198")
    assert group["metadata"]["ownerReferences"] == [OWNER]
    policy = group["spec"].get("schedulingPolicy", {}).get("gang", group["spec"])
    assert 3 in policy.values()
    assert group["spec"].get("queue") == ("gpus" if scheduler in ("volcano", "kai") else None)


def test_kai_takes_the_group_of_the_run_and_leaves_workers_alone_while_one_is_replaced(
    tmp_path: Path,
) -> None:
    values = ("--set", "workers.gang.scheduler=kai,workers.priorityClassName=train")
    pods = build(tmp_path, *values, profiles=("multi-node",))
    template = load_templates(tmp_path).pod_group
    assert template is not None
    assert gang.build_pod_group(template, "run_0198", num_pods=3, owner=OWNER)["spec"] == {
        "minMember": 3,
        "queue": "default-queue",
        "priorityClassName": "train",
        "stalenessGracePeriod": "-1s",
    }
    skips = [pod["metadata"]["annotations"]["kai.scheduler/skip-podgrouper"] for pod in pods]
    assert skips == ["true"] * 3


def test_pods_are_in_no_group_without_a_gang_scheduler(tmp_path: Path) -> None:
    pods = build(tmp_path, profiles=("multi-node",))
    assert load_templates(tmp_path).pod_group is None
    assert "$(GROUP)" not in str(pods)


def test_gpus_and_other_devices_are_claimed_where_the_values_name_templates(tmp_path: Path) -> None:
    values = (
        "--set", "trainer.gpu.resourceClaimTemplate=one-gpu,rollout.gpu.resourceClaimTemplate=one-gpu",
        "--set", "workers.resourceClaimTemplates.rdma=one-nic",
    )  # fmt: skip
    pods = build(tmp_path, *values, profiles=("multi-node",), trainer={"world_size": 2})
    for pod, num_gpus in zip(pods, (2, 1, 1), strict=True):
        validate_manifest(pod, "1.35")
        templates = [claim["resourceClaimTemplateName"] for claim in pod["spec"]["resourceClaims"]]
        assert templates == ["one-nic"] + num_gpus * ["one-gpu"]
        (container,) = pod["spec"]["containers"]
        claimed = [claim["name"] for claim in container["resources"]["claims"]]
        assert claimed == [claim["name"] for claim in pod["spec"]["resourceClaims"]]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_rollouts_that_share_the_trainers_gpus_share_its_claims(tmp_path: Path) -> None:
    values = (
        "--set", "trainer.gpu.resourceClaimTemplate=one-gpu,rollout.gpu.resourceClaimTemplate=one-gpu",
    )  # fmt: skip
    (pod,) = build(
        tmp_path, *values, profiles=("multi-node",),
        trainer={"world_size": 2}, topology={"placement": "colocated"},
    )  # fmt: skip
    validate_manifest(pod, "1.35")
    trainer, *rollouts = [
        container["resources"]["claims"] for container in pod["spec"]["containers"]
    ]
    assert len(trainer) == len(pod["spec"]["resourceClaims"]) == 2
    assert all(claims == trainer for claims in rollouts)
