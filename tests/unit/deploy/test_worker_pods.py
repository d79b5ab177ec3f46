"""The pods that the controller makes from the chart's own templates."""

from pathlib import Path

import kubernetes_validate
import pytest

from services.common.errors import FailedPreconditionError
from services.common.spec.loader import parse_spec
from services.controller.launch.worker_pods import Pod, build_pods, load_templates
from tests.unit.deploy.chart import one, render

SPEC = {
    "name": "demo",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "python", "path": "sort4.py:train"}},
    "rollout": {"replicas": 2, "rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 1, "prompts_per_step": 1},
}
OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "controller", "uid": "u1"}


def build(folder: Path, *values: str, profiles: tuple[str, ...], world_size: int = 1) -> list[Pod]:
    config = one(render(*values, profiles=profiles), "ConfigMap", "demo-slipstream-workers")
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    spec = parse_spec({**SPEC, "trainer": {**SPEC["trainer"], "world_size": world_size}})
    return build_pods(
        load_templates(folder), "run_0198", spec, controller_address="c:50051", owner=OWNER
    )


def environment(container: Pod) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container["env"]}


@pytest.mark.parametrize(
    "profiles", [("cpu-smoke",), ("one-gpu-node",), ("multi-node", "rdma")], ids="+".join
)
def test_pods_fit_the_schema_of_kubernetes_and_end_with_their_owner(
    tmp_path: Path, profiles: tuple[str, ...]
) -> None:
    for pod in build(tmp_path, profiles=profiles):
        kubernetes_validate.validate(pod, "1.35", strict=True)
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


def test_roles_of_their_own_get_pods_of_the_trainers_program(tmp_path: Path) -> None:
    config = one(render(profiles=("multi-node",)), "ConfigMap", "demo-slipstream-workers")
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    spec = parse_spec(
        {
            **SPEC,
            "rollout": {"rewards": [{"name": "exact_match"}]},
            "algorithm": {"kl": {"coefficient": 0.1}},
            "topology": {
                "task_groups": ["train", "ref_logp", "generate"],
                "ratios": [0.5, 0.25, 0.25],
                "gpus": 4,
            },
        }
    )
    pods = build_pods(
        load_templates(tmp_path), "run_0198", spec, controller_address="c:50051", owner=OWNER
    )
    names = [pod["metadata"]["name"].removeprefix("run-0198-") for pod in pods]
    assert names == ["trainer-0", "rollout-0", "ref-logp-0"]
    kubernetes_validate.validate(pods[2], "1.35", strict=True)
    (container,) = pods[2]["spec"]["containers"]
    assert environment(container)["SLIPSTREAM_TRAINER_ROLE"] == "ref_logp"
    assert "--nproc-per-node=2" in pods[0]["spec"]["containers"][0]["command"]


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
    for pod in pods:
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert labels["kueue.x-k8s.io/pod-group-name"] == "run-0198"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "3"
    (plain, *_) = build(tmp_path, profiles=("multi-node",))
    assert not [label for label in plain["metadata"]["labels"] if "kueue" in label]


def test_bundled_workers_ask_for_a_gpu_each_in_one_pod(tmp_path: Path) -> None:
    (pod,) = build(tmp_path, profiles=("one-gpu-node",))
    limits = [container["resources"]["limits"] for container in pod["spec"]["containers"]]
    assert [limit["nvidia.com/gpu"] for limit in limits] == ["1", "1", "1"]


def test_several_trainer_processes_start_by_torchrun(tmp_path: Path) -> None:
    pods = build(tmp_path, profiles=("multi-node",), world_size=8)
    command = pods[0]["spec"]["containers"][0]["command"]
    assert command == ["torchrun", "--standalone", "--nproc-per-node=8", "-m", "services.trainer"]
    assert "command" not in pods[1]["spec"]["containers"][0]


def test_missing_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="mount the chart's ConfigMap"):
        load_templates(tmp_path)
