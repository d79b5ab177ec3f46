"""Tests of the chart: lint, rendering over a matrix, rejection of bad values, and the security checklist."""

import base64
import json
import re
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from deploy.reference import rlrun
from deploy.values_table import table
from services.common.security.issuer import Issuer
from services.extras.kubernetes import rlruns
from services.extras.kubernetes.pod_api import EVICTABLE_LABEL
from services.extras.kubernetes.scale import GROUP, PLURAL, VERSION
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
from tests.helpers.manifests import validate_manifest

_PROFILES: tuple[tuple[str, ...], ...] = (
    (),
    ("cpu-smoke",),
    ("one-gpu-node",),
    ("vllm-servers",),
    ("multi-node",),
    ("multi-node", "rdma"),
)
_CUSTOM = {"PodMonitor", "PrometheusRule", "Certificate", "HTTPRoute", "GRPCRoute"}
_BAD_VALUES = [
    ("trainer.gpu.count=8", ("trainer", "count")),
    ("controller.replicas=0", ("controller", "replicas")),
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
    ("rlruns.namespaces={Team_A}", ("rlruns", "namespaces")),
    ("fullnameOverride=rl.train", ("fullnameOverride",)),
    ("commonLabels.team=a team", ("commonLabels", "team")),
    (r"commonLabels.app\.kubernetes\.io/name=x", ("app.kubernetes.io/name",)),
    (r"monitoring.podMonitor.labels.helm\.sh/chart=x", ("helm.sh/chart",)),
    ("workers.podLabels.team=a/b", ("podLabels", "team")),
    ("workers.resourceClaimTemplates.rdma=One NIC", ("resourceClaimTemplates", "rdma")),
]


@pytest.mark.parametrize(
    ("version", "profiles"),
    [
        ("helm3", ()),
        ("helm4", _PROFILES[-1]),
        *(
            pytest.param(version, profiles, marks=pytest.mark.nightly)
            for version in ("helm3", "helm4")
            for profiles in _PROFILES
        ),
    ],
)
def test_chart_lints_strictly(version: str, profiles: tuple[str, ...]) -> None:
    files = [argument for name in profiles for argument in ("-f", str(PROFILES / f"{name}.yaml"))]
    result = helm("lint", "--strict", "--quiet", str(CHART), *files, *EVERYTHING, version=version)
    assert result.returncode == 0, result.stdout
    assert "WARNING" not in result.stdout
    assert "ERROR" not in result.stdout


@pytest.mark.parametrize("version", ["helm3", "helm4"])
def test_schema_refuses_each_bad_value(version: str) -> None:
    values = [argument for value, _ in _BAD_VALUES for argument in ("--set", value)]
    result = helm("template", "demo", str(CHART), *values, version=version)
    assert result.returncode != 0
    for value, path in _BAD_VALUES:
        lines = result.stderr.splitlines()
        assert any(all(key in line for key in path) for line in lines), (value, result.stderr)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("workers.gang.scheduler=slurm", ("gang", "scheduler")),
        ("workers.gang.scheduler=volcano,workers.kueue.queueName=q", ("gang", "kueue")),
    ],
)
def test_templates_refuse_gangs_without_a_scheduler(value: str, path: tuple[str, ...]) -> None:
    result = helm("template", "demo", str(CHART), "--set", value)
    assert result.returncode != 0
    assert all(key in result.stderr for key in path), result.stderr


@pytest.mark.parametrize(
    ("kube_version", "profiles"),
    [
        ("1.28.0", ()),
        ("1.37.0", _PROFILES[-1]),
        pytest.param("1.35.0", (), marks=pytest.mark.nightly),
        *(
            pytest.param("1.37.0", profiles, marks=pytest.mark.nightly)
            for profiles in _PROFILES[:-1]
        ),
    ],
)
def test_manifests_fit_the_schemas_of_kubernetes(
    kube_version: str, profiles: tuple[str, ...]
) -> None:
    manifests = render(*EVERYTHING, profiles=profiles, kube_version=kube_version)
    templates = list(worker_templates(manifests).values())
    assert len(manifests) > 18
    for manifest in [*manifests, *templates]:
        if manifest["kind"] not in _CUSTOM:
            validate_manifest(manifest, kube_version.rpartition(".")[0])


def test_helm_3_and_4_render_the_same() -> None:
    def rendered(version: str) -> list[Manifest]:
        manifests = render(*EVERYTHING, version=version)
        return [m | {"data": set(m["data"])} if m["kind"] == "Secret" else m for m in manifests]

    assert rendered("helm3") == rendered("helm4")


def test_a_release_makes_what_its_services_know_each_other_by() -> None:
    secrets = {m["metadata"]["name"]: m for m in render() if m["kind"] == "Secret"}
    data = {name.removeprefix("demo-slipstream-"): m["data"] for name, m in secrets.items()}
    assert set(data) == {"service-key", "admin-token", "issuer"}
    assert len(base64.b64decode(data["service-key"]["key"])) == 64
    issuer = x509.load_pem_x509_certificate(base64.b64decode(data["issuer"]["tls.crt"]))
    assert issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert data["issuer"]["ca.crt"] == data["issuer"]["tls.crt"]
    assert not [m for m in render(*EXISTING) if m["kind"] == "Secret"]


def test_services_make_certificates_with_the_issuer_that_the_chart_makes(tmp_path: Path) -> None:
    (secret,) = [m for m in render() if m["metadata"]["name"] == "demo-slipstream-issuer"]
    for name, data in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(data))
    certificate = x509.load_pem_x509_certificate(Issuer(tmp_path).issue("a.slipstream").chain)
    certificate.verify_directly_issued_by(
        x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    )


def test_cert_manager_makes_an_issuer_of_days_where_it_is_asked_to() -> None:
    manifests = render("--set", "tls.mode=certManager,tls.issuer=ours")
    (certificate,) = [m["spec"] for m in manifests if m["kind"] == "Certificate"]
    assert certificate["secretName"] == "demo-slipstream-issuer"
    assert certificate["isCA"] is True
    assert (certificate["duration"], certificate["renewBefore"]) == ("720h", "360h")


@pytest.mark.parametrize("mode", ["self", "certManager", "existing", "off"])
def test_services_have_the_issuer_and_workers_a_place_for_their_runs_certificate(mode: str) -> None:
    for component, pod in pods(render("--set", f"tls.mode={mode},tls.issuer=ours")).items():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert ("tls" in volumes) is (mode != "off")
        if mode != "off":
            is_worker = component in ("trainer", "rollout")
            name = None if is_worker else "demo-slipstream-issuer"
            assert volumes["tls"]["secret"].get("secretName") == name


def test_the_key_and_the_issuer_are_with_the_services_and_no_worker() -> None:
    for component, pod in pods(render("--set", "transferqueue.shards=2")).items():
        is_service = component.startswith(("controller", "transferqueue"))
        assert ("service-key" in json.dumps(pod)) is is_service
        assert ("demo-slipstream-issuer" in json.dumps(pod)) is (is_service or component == "test")


@pytest.mark.parametrize(
    ("release", "overrides"),
    [
        ("team.a", ""),
        ("a" * 53, ""),
        ("a" * 31 + ".b", ""),
        ("123", "nameOverride=123,fullnameOverride=rl"),
    ],
)
def test_names_of_any_release_are_valid(release: str, overrides: str) -> None:
    values = ("--set", "transferqueue.shards=2", "--set-string", overrides)
    result = helm("template", release, str(CHART), *values)
    assert result.returncode == 0, result.stderr
    manifests = [m for m in yaml.load_all(result.stdout, yaml.CSafeLoader) if m]
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
        # The label controller-revision-hash of a StatefulSet's pods is 11 characters longer.
        assert len(name) <= (52 if manifest["kind"] == "StatefulSet" else 63)
        assert {*map(type, manifest["metadata"].get("labels", {}).values())} <= {str}


def test_a_release_whose_services_would_have_invalid_names_is_refused() -> None:
    result = helm("template", "1st", str(CHART))
    assert result.returncode != 0
    assert "fullnameOverride" in result.stderr


def test_old_kubernetes_gets_what_it_knows() -> None:
    manifests = render(kube_version="1.20.2")
    assert one(manifests, "PodDisruptionBudget", "demo-slipstream-worker")["apiVersion"].endswith(
        "v1beta1"
    )
    probes = pods(manifests)["transferqueue"]["spec"]["containers"][0]
    assert probes["readinessProbe"]["tcpSocket"] == {"port": "grpc"}


def test_kubernetes_asks_the_health_service_where_it_can() -> None:
    plain = pods(render("--set", "tls.mode=off"))["transferqueue"]["spec"]["containers"][0]
    assert plain["readinessProbe"]["grpc"] == {"port": 50051}


@pytest.mark.parametrize("profiles", _PROFILES, ids="+".join)
def test_every_pod_is_locked_down(profiles: tuple[str, ...]) -> None:
    pods_by_component = pods(render(profiles=profiles))
    assert set(pods_by_component) == {"controller", "transferqueue", "trainer", "rollout", "test"}
    for component, pod in pods_by_component.items():
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
            assert container["resources"]["requests"]["ephemeral-storage"]


_TWO = ("--set", "controller.replicas=2,controller.database.existingSecret=database")


def test_several_controllers_need_a_database_server() -> None:
    result = helm("template", "demo", str(CHART), "--set", "controller.replicas=2")
    assert result.returncode != 0
    assert "database" in result.stderr
    assert "existingSecret" in result.stderr


def test_several_controllers_are_replaced_one_by_one_and_answer_all_the_time() -> None:
    manifests = render(*_TWO)
    spec = one(manifests, "Deployment", "demo-slipstream-controller")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}

    def source(name: str) -> str:
        return str(env[name]["valueFrom"]["fieldRef"]["fieldPath"])

    assert env["SLIPSTREAM_CONTROLLER_HOLDER"]["value"] == "$(POD_NAME)"
    assert [*env].index("POD_NAME") < [*env].index("SLIPSTREAM_CONTROLLER_HOLDER")
    assert source("POD_NAME") == "metadata.name"
    assert source("SLIPSTREAM_CONTROLLER_PEER_HOST") == "status.podIP"
    # An ending pod serves until the Service no longer routes calls to it.
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert pod["terminationGracePeriodSeconds"] > 5
    (state,) = [volume for volume in pod["volumes"] if volume["name"] == "state"]
    assert "emptyDir" in state
    assert not [
        m
        for m in manifests
        if m["kind"] == "PersistentVolumeClaim"
        and m["metadata"]["name"] == "demo-slipstream-controller"
    ]
    budget = one(manifests, "PodDisruptionBudget", "demo-slipstream-controller")["spec"]
    assert budget["minAvailable"] == 1


def test_a_change_of_the_number_of_controllers_changes_no_kind_of_source() -> None:
    """Server-side apply keeps the defaults of a removed source, such as ``fieldRef.apiVersion``."""
    containers = [
        one(render(*options), "Deployment", "demo-slipstream-controller")["spec"]["template"][
            "spec"
        ]["containers"][0]
        for options in ((), _TWO)
    ]
    single, several = (
        {
            "environment": {entry["name"]: {*entry} for entry in container["env"]},
            "handlers": {
                name: {*container[name]}
                for name in ("startupProbe", "livenessProbe", "readinessProbe")
            },
            "preStop": {*container["lifecycle"]["preStop"]},
        }
        for container in containers
    )
    common = single["environment"].keys() & several["environment"].keys()
    assert {name: single["environment"][name] for name in common} == {
        name: several["environment"][name] for name in common
    }
    assert single["preStop"] == several["preStop"] == {"exec"}
    for name, keys in single["handlers"].items():
        assert several["handlers"][name] - {"failureThreshold"} == keys - {"failureThreshold"}


def test_one_controller_is_replaced_before_the_next_starts() -> None:
    spec = one(render(), "Deployment", "demo-slipstream-controller")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = spec["template"]["spec"]["containers"]
    assert "SLIPSTREAM_CONTROLLER_PEER_HOST" not in {entry["name"] for entry in container["env"]}


def test_further_shards_register_with_the_index() -> None:
    manifests = render("--set", "transferqueue.shards=3")
    budget = one(manifests, "PodDisruptionBudget", "demo-slipstream-transferqueue-shard")["spec"]
    assert budget["minAvailable"] == 2
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
    assert spec["namespaceSelector"]["matchNames"] == ["train", "train-workers"]
    (rule,) = spec["selector"]["matchExpressions"]
    for component, pod in pods(manifests).items():
        labels = pod["metadata"]["labels"]
        assert _matches(spec["selector"], labels)
        is_chosen = labels["app.kubernetes.io/component"] not in rule["values"]
        assert is_chosen is (component not in ("test", "fetch"))


def test_services_serve_metrics_on_the_address_of_their_pod() -> None:
    pods_by_component = pods(render("--set", "transferqueue.shards=3"))
    for component in ("controller", "transferqueue", "transferqueue-shard"):
        environment = {
            item["name"]: item.get("value")
            for item in pods_by_component[component]["spec"]["containers"][0]["env"]
        }
        prefix = f"SLIPSTREAM_{component.removesuffix('-shard').upper()}"
        assert environment[f"{prefix}_BIND"].startswith(("$(POD_IP):", "0.0.0.0:"))


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
    pods_by_component = pods(render("--set", "transferqueue.shards=3"))
    for component in ("controller", "transferqueue", "transferqueue-shard"):
        container = pods_by_component[component]["spec"]["containers"][0]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


def test_controller_may_do_nothing_but_run_worker_pods() -> None:
    unmoved = render("--set", "controller.drain.enabled=false")
    (role,) = [m for m in unmoved if m["kind"] == "Role"]
    assert role["metadata"]["namespace"] == "train-workers"
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
            "apiGroups": [""],
            "resources": ["services"],
            "resourceNames": ["demo-slipstream-workers"],
            "verbs": ["get"],
        },
    ]
    assert not [m for m in unmoved if m["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_drains_need_the_right_to_see_nodes_and_to_release_pods() -> None:
    manifests = render("--set", "transferqueue.shards=3")
    nodes = one(manifests, "ClusterRole", "train-demo-slipstream-controller")
    assert nodes["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    ]
    (subject,) = one(manifests, "ClusterRoleBinding", nodes["metadata"]["name"])["subjects"]
    assert (subject["name"], subject["namespace"]) == ("demo-slipstream-controller", "train")
    drain_role = one(manifests, "Role", "demo-slipstream-drain")
    assert drain_role["metadata"]["namespace"] == "train"
    assert drain_role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "resourceNames": [
                "demo-slipstream-transferqueue-0",
                "demo-slipstream-transferqueue-shard-0",
                "demo-slipstream-transferqueue-shard-1",
            ],
            "verbs": ["delete", "patch"],
        },
    ]
    workers = one(manifests, "Role", "demo-slipstream-controller")["rules"][0]
    assert workers["verbs"] == ["create", "delete", "list", "watch", "patch"]
    env = {
        e["name"]: e.get("value")
        for e in pods(manifests)["controller"]["spec"]["containers"][0]["env"]
    }
    assert env["SLIPSTREAM_CONTROLLER_WATCH_NODES"] == "true"
    assert "ToBeDeletedByClusterAutoscaler" in json.loads(env["SLIPSTREAM_CONTROLLER_DRAIN_TAINTS"])
    assert env["SLIPSTREAM_CONTROLLER_TRANSFERQUEUE_NAMESPACE"] == "train"


def test_budgets_let_go_what_the_controller_has_released() -> None:
    manifests = render("--set", "transferqueue.shards=3")
    budgets = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "PodDisruptionBudget"}
    released = [{"key": EVICTABLE_LABEL, "operator": "DoesNotExist"}]
    names = ("worker", "transferqueue", "transferqueue-shard")
    assert set(budgets) == {f"demo-slipstream-{name}" for name in names}, "one controller may go"
    for budget in budgets.values():
        assert budget["spec"]["selector"]["matchExpressions"] == released
    workers = budgets["demo-slipstream-worker"]
    assert workers["metadata"]["namespace"] == "train-workers"
    for template in worker_templates(manifests).values():
        labels = template["metadata"]["labels"]
        assert workers["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert EVICTABLE_LABEL not in labels


def test_without_drains_budgets_refuse_evictions_of_trainers_and_leave_rollouts_alone() -> None:
    manifests = render("--set", "controller.drain.enabled=false")
    selector = one(manifests, "PodDisruptionBudget", "demo-slipstream-trainer")["spec"]["selector"]
    assert selector["matchLabels"]["app.kubernetes.io/component"] == "trainer"
    assert "matchExpressions" not in selector


def test_only_what_workers_need_is_in_their_namespace() -> None:
    values = "workers.kueue.queueName=gpus,tls.mode=certManager,tls.issuer=ours"
    for options in ((), EVERYTHING, ("--set", values)):
        manifests = render(*options)
        theirs = {m["kind"] for m in manifests if m["metadata"].get("namespace") == "train-workers"}
        assert theirs - {"Job"} == {
            "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount",
        }  # fmt: skip
        for template in worker_templates(manifests).values():
            assert template["metadata"]["namespace"] == "train-workers"
    bindings = [m for m in render() if m["kind"] == "RoleBinding"]
    assert {subject["namespace"] for m in bindings for subject in m["subjects"]} == {"train"}


def test_the_namespace_of_workers_is_made_and_goes_unless_it_holds_claims() -> None:
    def namespace(*values: str) -> Manifest:
        return one(render(*values), "Namespace", "train-workers")["metadata"]

    assert "annotations" not in namespace()
    keep = {"helm.sh/resource-policy": "keep"}
    for claim in ("checkpoints", "modelCache"):
        assert namespace("--set", f"workers.{claim}.existingClaim=a")["annotations"] == keep
    enforce = "pod-security.kubernetes.io/enforce"
    assert namespace()["labels"][enforce] == "restricted"
    for value in ("hostNetwork=true", "hostIPC=true", "rdma.resourceName=rdma/hca"):
        assert namespace("--set", f"workers.{value}")["labels"][enforce] == "privileged"
    for values in ("workers.createNamespace=false", "workers.namespace=train"):
        assert not [m for m in render("--set", values) if m["kind"] == "Namespace"]


@pytest.mark.parametrize("name", ["train", "gpus"])
def test_workers_are_where_they_are_asked_to_be(name: str) -> None:
    manifests = render("--set", f"workers.namespace={name}")
    assert {m["metadata"].get("namespace") for m in manifests} - {None} == {"train", name}
    (container,) = pods(manifests)["controller"]["spec"]["containers"]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment["SLIPSTREAM_CONTROLLER_NAMESPACE"] == name
    assert environment["SLIPSTREAM_CONTROLLER_WORKERS_SERVICE"] == "demo-slipstream-workers"
    keys = [(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests]
    assert len(keys) == len(set(keys))


def test_only_autoscaling_defines_a_kind_and_lets_the_controller_write_its_objects() -> None:
    switched_on = ("--set", "workers.rolloutScales.enabled=true")
    manifests = render(*switched_on)
    (definition,) = [m for m in manifests if m["kind"] == "CustomResourceDefinition"]
    validate_manifest(definition, "1.35")
    (version,) = definition["spec"]["versions"]
    assert definition["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    policy = {"helm.sh/resource-policy": "keep"}
    assert definition["metadata"]["annotations"] == policy, "other releases have scales, too"
    assert version["name"] == VERSION
    rules = one(manifests, "Role", "demo-slipstream-controller")["rules"]
    assert {rule["resources"][0] for rule in rules if rule["apiGroups"] == [GROUP]} == {
        "rolloutscales",
        "rolloutscales/status",
    }
    elsewhere = render(*switched_on, "--set", "workers.rolloutScales.define=false")
    assert not [m for m in elsewhere if m["kind"] == "CustomResourceDefinition"]


def test_served_namespaces_get_a_kind_and_the_rights_to_mirror_its_objects() -> None:
    assert not [m for m in render() if "rlrun" in m["metadata"]["name"]]
    manifests = render("--set", "rlruns.namespaces={blue,green}")
    (definition,) = [m for m in manifests if m["kind"] == "CustomResourceDefinition"]
    validate_manifest(definition, "1.35")
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (version,) = definition["spec"]["versions"]
    assert (definition["metadata"]["name"], version["name"]) == (
        f"{rlruns.PLURAL}.{rlruns.GROUP}",
        rlruns.VERSION,
    )
    assert version["schema"]["openAPIV3Schema"]["properties"]["spec"] == rlrun.schema()
    (container,) = pods(manifests)["controller"]["spec"]["containers"]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment["SLIPSTREAM_CONTROLLER_RLRUN_NAMESPACES"] == '["blue","green"]'
    roles = [
        m
        for m in manifests
        if m["kind"] == "Role" and m["metadata"]["namespace"] in ("blue", "green")
    ]
    assert len(roles) == 2
    for role in roles:
        assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
            "rlruns",
            "rlruns/status",
            "events",
        }
    elsewhere = render(
        "--set", "rlruns.namespaces={blue},rlruns.define=false,controller.drain.enabled=false"
    )
    assert not [m for m in elsewhere if m["kind"] in ("CustomResourceDefinition", "ClusterRole")]


def test_rdma_devices_are_asked_for_as_text() -> None:
    manifests = render(profiles=("multi-node", "rdma"))
    for template in worker_templates(manifests).values():
        resources = template["spec"]["containers"][0]["resources"]
        for section in ("requests", "limits"):
            assert resources[section]["rdma/hca"] == "1"
            assert all(isinstance(quantity, str) for quantity in resources[section].values())


def test_services_and_policies_select_pods_and_ports_that_exist() -> None:
    manifests = render(*EVERYTHING)
    all_pods = list(pods(manifests).values())
    selecting = [m for m in manifests if m["kind"] in ("Service", "NetworkPolicy")]
    assert len(selecting) == 10
    for manifest in selecting:
        spec = manifest["spec"]
        labels = spec["selector"] if "selector" in spec else spec["podSelector"]["matchLabels"]
        chosen = [pod for pod in all_pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert chosen, manifest["metadata"]["name"]
        for port in spec.get("ports", []):
            assert port["protocol"] == "TCP"
            assert port["targetPort"] in _port_names(chosen[0])


def test_packaged_chart_holds_no_stray_files() -> None:
    names = {path.relative_to(CHART).parts[0] for path in CHART.rglob("*") if path.is_file()}
    assert names == {
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
    """Returns the paths of all values that are not sections."""
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
