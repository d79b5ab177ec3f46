"""The chart: lints, renders over a matrix, refuses bad values, and keeps what the checklist promises."""

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from deploy.values_table import table
from tests.unit.deploy.chart import (
    CHART,
    EVERYTHING,
    PROFILES,
    Manifest,
    helm,
    one,
    pods,
    render,
    worker_templates,
)

_PROFILES: tuple[tuple[str, ...], ...] = (
    (),
    ("cpu-smoke",),
    ("one-gpu-node",),
    ("multi-node",),
    ("multi-node", "rdma"),
)
_CUSTOM = {"PodMonitor", "PrometheusRule", "Certificate", "HTTPRoute"}
_BAD_VALUES = [
    ("trainer.gpu.count=-1", ("trainer", "count")),
    ("controller.replicas=2", ("controller", "replicas")),
    ("controler.logLevel=INFO", ("controler",)),
    ("controller.logLevel=LOUD", ("controller", "logLevel")),
    ("workers.topology=ring", ("workers", "topology")),
    ("image.tag=latest", ("image", "tag")),
    ("trainer.image.digest=abc", ("trainer", "digest")),
    ("trainer.gpu.resourceName=gpu", ("gpu", "resourceName")),
    ("trainer.resources.limits.memory=many", ("limits", "memory")),
    ("monitoring.prometheusRule.queueFillRatio=2", ("queueFillRatio",)),
    ("transferqueue.capacityMiB=0", ("capacityMiB",)),
]


@pytest.mark.parametrize("version", ["helm3", "helm4"])
@pytest.mark.parametrize("profiles", _PROFILES, ids="+".join)
def test_chart_lints_strictly(version: str, profiles: tuple[str, ...]) -> None:
    files = [part for name in profiles for part in ("-f", str(PROFILES / f"{name}.yaml"))]
    done = helm("lint", "--strict", "--quiet", str(CHART), *files, *EVERYTHING, version=version)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


@pytest.mark.parametrize("version", ["helm3", "helm4"])
@pytest.mark.parametrize(("value", "path"), _BAD_VALUES)
def test_schema_refuses_bad_values(version: str, value: str, path: tuple[str, ...]) -> None:
    done = helm("template", "demo", str(CHART), "--set", value, version=version)
    assert done.returncode != 0
    assert all(part in done.stderr for part in path), done.stderr


@pytest.mark.parametrize("kube_version", ["1.28.0", "1.35.0", "1.37.0"])
@pytest.mark.parametrize("profiles", _PROFILES, ids="+".join)
def test_manifests_fit_the_schemas_of_kubernetes(
    kube_version: str, profiles: tuple[str, ...]
) -> None:
    manifests = render(*EVERYTHING, profiles=profiles, kube_version=kube_version)
    templates = list(worker_templates(manifests).values())
    assert len(manifests) > 18
    for manifest in [*manifests, *templates]:
        if manifest["kind"] not in _CUSTOM:
            kubernetes_validate.validate(manifest, kube_version.rpartition(".")[0], strict=True)


def test_helm_3_and_4_render_the_same() -> None:
    assert render(*EVERYTHING, version="helm3") == render(*EVERYTHING, version="helm4")


def test_old_kubernetes_gets_what_it_knows() -> None:
    manifests = render(kube_version="1.20.2")
    assert one(manifests, "PodDisruptionBudget", "demo-slipstream-trainer")["apiVersion"].endswith(
        "v1beta1"
    )
    probes = pods(manifests)["transferqueue"]["spec"]["containers"][0]
    assert probes["readinessProbe"]["tcpSocket"] == {"port": "grpc"}


@pytest.mark.parametrize("profiles", _PROFILES, ids="+".join)
def test_every_pod_is_locked_down(profiles: tuple[str, ...]) -> None:
    made = pods(render(profiles=profiles))
    assert set(made) == {"controller", "transferqueue", "trainer", "rollout", "test"}
    for component, pod in made.items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (component == "controller")
        assert "hostPath" not in json.dumps(spec.get("volumes", []))
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]


def test_shards_beside_the_first_register_with_the_index() -> None:
    manifests = render("--set", "transferqueue.shards=3")
    shards = one(manifests, "StatefulSet", "demo-slipstream-transferqueue-shard")
    assert shards["spec"]["replicas"] == 2
    (container,) = shards["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment["SLIPSTREAM_TRANSFERQUEUE_INDEX_ADDRESS"] == (
        "demo-slipstream-transferqueue.train.svc:50051"
    )
    assert not [m for m in render() if m["metadata"]["name"].endswith("-shard")]


def test_new_worker_templates_replace_the_controller_that_reads_them() -> None:
    def checksum(*values: str) -> str:
        annotations = pods(render(*values))["controller"]["metadata"]["annotations"]
        return str(annotations["checksum/workers"])

    assert checksum() == checksum("--set", "controller.logLevel=DEBUG")
    assert checksum() != checksum("--set", "trainer.gpu.count=4")


def test_pod_monitor_selects_every_pod_that_serves_metrics() -> None:
    manifests = render(*EVERYTHING)
    spec = one(manifests, "PodMonitor", "demo-slipstream")["spec"]
    (rule,) = spec["selector"]["matchExpressions"]
    for component, pod in pods(manifests).items():
        labels = pod["metadata"]["labels"]
        assert _matches(spec["selector"], labels)
        is_chosen = labels["app.kubernetes.io/component"] not in rule["values"]
        assert is_chosen is (component != "test")


def test_only_rdma_adds_a_capability() -> None:
    def added(profiles: tuple[str, ...]) -> set[str]:
        return {
            capability
            for pod in pods(render(profiles=profiles)).values()
            for container in pod["spec"]["containers"]
            for capability in container["securityContext"]["capabilities"].get("add", [])
        }

    assert added(("multi-node",)) == set()
    assert added(("multi-node", "rdma")) == {"IPC_LOCK"}


def test_services_that_stay_have_all_three_probes() -> None:
    made = pods(render("--set", "transferqueue.shards=3"))
    for component in ("controller", "transferqueue", "transferqueue-shard"):
        container = made[component]["spec"]["containers"][0]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def test_controller_may_do_nothing_but_run_worker_pods() -> None:
    role = one(render(), "Role", "demo-slipstream-controller")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "list", "watch"]},
        {
            "apiGroups": ["apps"],
            "resources": ["deployments"],
            "resourceNames": ["demo-slipstream-controller"],
            "verbs": ["get"],
        },
    ]
    assert not [m for m in render() if m["kind"] in ("ClusterRole", "ClusterRoleBinding", "Secret")]


def test_gpu_and_rdma_devices_are_asked_for_as_text() -> None:
    manifests = render(profiles=("multi-node", "rdma"))
    for role, gpus in (("trainer", "8"), ("rollout", "1")):
        resources = worker_templates(manifests)[role]["spec"]["containers"][0]["resources"]
        for part in ("requests", "limits"):
            assert resources[part]["nvidia.com/gpu"] == gpus
            assert resources[part]["rdma/hca"] == "1"
            assert all(isinstance(quantity, str) for quantity in resources[part].values())


def test_services_and_policies_select_pods_and_ports_that_exist() -> None:
    manifests = render(*EVERYTHING)
    made = list(pods(manifests).values())
    selecting = [m for m in manifests if m["kind"] in ("Service", "NetworkPolicy")]
    assert len(selecting) == 5
    for manifest in selecting:
        spec = manifest["spec"]
        labels = spec["selector"] if "selector" in spec else spec["podSelector"]["matchLabels"]
        chosen = [pod for pod in made if labels.items() <= pod["metadata"]["labels"].items()]
        assert chosen, manifest["metadata"]["name"]
        for port in spec.get("ports", []):
            assert port["protocol"] == "TCP"
            assert port["targetPort"] in _port_names(chosen[0])


def test_packaged_chart_holds_no_stray_files() -> None:
    found = {path.relative_to(CHART).parts[0] for path in CHART.rglob("*") if path.is_file()}
    assert found == {
        ".helmignore", "Chart.yaml", "README.md", "files", "profiles", "templates",
        "values.schema.json", "values.yaml",
    }  # fmt: skip


def test_table_of_values_is_up_to_date() -> None:
    assert table(CHART / "values.yaml") in (CHART / "README.md").read_text(encoding="utf-8")


def test_every_value_is_explained() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    explained = {line.split("|")[1].strip(" `") for line in _rows(CHART / "values.yaml")}
    assert set(_leaves(values, "")) <= explained


def _rows(path: Path) -> list[str]:
    return table(path).splitlines()[2:]


def _leaves(value: object, path: str) -> list[str]:
    """Paths of values that are not sections."""
    if (
        isinstance(value, dict)
        and value
        and not path.endswith((".resources", "labels", "annotations"))
    ):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}")]
    return [path.removeprefix(".")]


def _port_names(pod: Manifest) -> set[str]:
    return {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())
