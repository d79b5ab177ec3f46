"""The chart: lints, renders over a matrix, refuses bad values, and keeps what the checklist promises."""

import base64
import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from deploy.values_table import table
from services.controller.launch.scale import GROUP, PLURAL, VERSION
from tests.helpers.chart import (
    CHART,
    EVERYTHING,
    EXISTING,
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
_CUSTOM = {"PodMonitor", "PrometheusRule", "Certificate", "HTTPRoute", "GRPCRoute"}
_BAD_VALUES = [
    ("trainer.gpu.count=8", ("trainer", "count")),
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
    ("tls.mode=certManager", ("tls", "issuer")),
    ("grpcRoute.enabled=true", ("grpcRoute", "parentRefs")),
    ("grpcRoute.enabled=true", ("tls", "mode")),
    ("workers.modelCache.fetch={Qwen/Qwen3-4B}", ("modelCache", "existingClaim")),
    ("tracing.endpoint=collector:4317", ("tracing", "endpoint")),
    ("tracing.ratio=2", ("tracing", "ratio")),
    ("controller.oidc.issuer=id.example.com", ("oidc", "issuer")),
    ("ingress.host=https://rl.example.com", ("ingress", "host")),
    ("controller.database.key=a/url", ("database", "key")),
    ("workers.envFromSecrets={HF_TOKEN}", ("envFromSecrets",)),
    ("workers.jobSet.enabled=yes-please", ("jobSet", "enabled")),
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
    def rendered(version: str) -> list[Manifest]:
        found = render(*EVERYTHING, version=version)
        return [m | {"data": set(m["data"])} if m["kind"] == "Secret" else m for m in found]

    assert rendered("helm3") == rendered("helm4")


def test_a_release_makes_what_its_services_know_each_other_by() -> None:
    made = {m["metadata"]["name"]: m for m in render() if m["kind"] == "Secret"}
    data = {name.removeprefix("demo-slipstream-"): m["data"] for name, m in made.items()}
    peers = ("controller", "transferqueue", "worker")
    assert set(data) == {"service-key", "admin-token", *(f"tls-{peer}" for peer in peers)}
    assert len(base64.b64decode(data["service-key"]["key"])) == 64
    authorities = {data[f"tls-{peer}"]["ca.crt"] for peer in peers}
    assert len(authorities) == 1
    for peer in peers:
        certificate = x509.load_pem_x509_certificate(
            base64.b64decode(data[f"tls-{peer}"]["tls.crt"])
        )
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert names.value.get_values_for_type(x509.DNSName) == [f"{peer}.slipstream"]
    assert not [m for m in render(*EXISTING) if m["kind"] == "Secret"]


def test_cert_manager_makes_the_certificates_where_it_is_asked_to() -> None:
    manifests = render("--set", "tls.mode=certManager,tls.issuer=ours")
    names = [m["spec"]["dnsNames"] for m in manifests if m["kind"] == "Certificate"]
    peers = ("controller", "transferqueue", "worker")
    assert names == [[f"{peer}.slipstream"] for peer in peers]


@pytest.mark.parametrize("mode", ["self", "existing", "off"])
def test_every_pod_shows_a_certificate_unless_tls_is_off(mode: str) -> None:
    for component, pod in pods(render("--set", f"tls.mode={mode}")).items():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        if mode == "off":
            assert "tls" not in volumes
            continue
        peer = component if component in ("controller", "transferqueue") else "worker"
        assert volumes["tls"]["secret"]["secretName"] == f"demo-slipstream-tls-{peer}"


def test_the_key_is_with_the_services_and_no_worker() -> None:
    for component, pod in pods(render("--set", "transferqueue.shards=2")).items():
        has_key = "service-key" in json.dumps(pod)
        assert has_key is component.startswith(("controller", "transferqueue"))


def test_old_kubernetes_gets_what_it_knows() -> None:
    manifests = render(kube_version="1.20.2")
    assert one(manifests, "PodDisruptionBudget", "demo-slipstream-trainer")["apiVersion"].endswith(
        "v1beta1"
    )
    probes = pods(manifests)["transferqueue"]["spec"]["containers"][0]
    assert probes["readinessProbe"]["tcpSocket"] == {"port": "grpc"}


def test_kubernetes_asks_the_health_service_where_it_can() -> None:
    plain = pods(render("--set", "tls.mode=off"))["transferqueue"]["spec"]["containers"][0]
    assert plain["readinessProbe"]["grpc"] == {"port": 50051}


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
    assert checksum() != checksum("--set", "trainer.gpu.resourceName=amd.com/gpu")


def test_pod_monitor_selects_every_pod_that_serves_metrics() -> None:
    manifests = render(*EVERYTHING)
    spec = one(manifests, "PodMonitor", "demo-slipstream")["spec"]
    (rule,) = spec["selector"]["matchExpressions"]
    for component, pod in pods(manifests).items():
        labels = pod["metadata"]["labels"]
        assert _matches(spec["selector"], labels)
        is_chosen = labels["app.kubernetes.io/component"] not in rule["values"]
        assert is_chosen is (component not in ("test", "fetch"))


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
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "delete"]},
        {
            "apiGroups": ["networking.k8s.io"],
            "resources": ["networkpolicies"],
            "verbs": ["create", "delete"],
        },
        {
            "apiGroups": ["apps"],
            "resources": ["deployments"],
            "resourceNames": ["demo-slipstream-controller"],
            "verbs": ["get"],
        },
    ]
    assert not [m for m in render() if m["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_only_autoscaling_defines_a_kind_and_lets_the_controller_write_its_objects() -> None:
    switched_on = ("--set", "workers.rolloutScales.enabled=true")
    manifests = render(*switched_on)
    (definition,) = [m for m in manifests if m["kind"] == "CustomResourceDefinition"]
    kubernetes_validate.validate(definition, "1.35", strict=True)
    (version,) = definition["spec"]["versions"]
    assert definition["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert version["name"] == VERSION
    rules = one(manifests, "Role", "demo-slipstream-controller")["rules"]
    assert {rule["resources"][0] for rule in rules if rule["apiGroups"] == [GROUP]} == {
        "rolloutscales",
        "rolloutscales/status",
    }
    elsewhere = render(*switched_on, "--set", "workers.rolloutScales.define=false")
    assert not [m for m in elsewhere if m["kind"] == "CustomResourceDefinition"]


def test_rdma_devices_are_asked_for_as_text() -> None:
    manifests = render(profiles=("multi-node", "rdma"))
    for template in worker_templates(manifests).values():
        resources = template["spec"]["containers"][0]["resources"]
        for part in ("requests", "limits"):
            assert resources[part]["rdma/hca"] == "1"
            assert all(isinstance(quantity, str) for quantity in resources[part].values())


def test_services_and_policies_select_pods_and_ports_that_exist() -> None:
    manifests = render(*EVERYTHING)
    made = list(pods(manifests).values())
    selecting = [m for m in manifests if m["kind"] in ("Service", "NetworkPolicy")]
    assert len(selecting) == 9
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
