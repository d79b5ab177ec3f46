"""Tests of the network policies, which are evaluated as a network plugin would."""

import itertools
import json
from collections.abc import Sequence

import pytest

from services.extras.kubernetes.worker_pods import run_policy
from tests.helpers.chart import EVERYTHING, Manifest, pods, render, worker_templates

# Allowed connections: (from, to, port).
_CONNECTIONS = {
    ("rollout", "controller", "grpc"),
    ("trainer", "controller", "grpc"),
    ("controller", "transferqueue", "grpc"),
    ("rollout", "transferqueue", "grpc"),
    ("trainer", "transferqueue", "grpc"),
    ("rollout", "transferqueue", "data"),
    ("trainer", "transferqueue", "data"),
    ("controller", "trainer", "grpc"),
    ("controller", "rollout", "grpc"),
    ("test", "controller", "grpc"),
    ("test", "transferqueue", "grpc"),
    ("transferqueue-shard", "transferqueue", "grpc"),
    ("rollout", "transferqueue-shard", "data"),
    ("trainer", "transferqueue-shard", "data"),
}
_NAMESPACE = "kubernetes.io/metadata.name"
_SERVED = {
    "controller": {"grpc"},
    "transferqueue": {"grpc", "data"},
    "transferqueue-shard": {"data"},
    "trainer": {"grpc"},
    "rollout": {"grpc"},
}


_INGRESS = ("--set", "networkPolicy.egress.enabled=false")
_TWO = ("--set", "controller.replicas=2,controller.database.existingSecret=database")
_FORWARDED = ("controller", "controller", "grpc")


@pytest.mark.parametrize(
    ("options", "further"),
    [
        (_INGRESS, set()),
        ((), set()),
        (EVERYTHING, set()),
        ((*_INGRESS, *_TWO), {_FORWARDED}),
        (_TWO, {_FORWARDED}),
        ((*EVERYTHING, *_TWO), {_FORWARDED}),
    ],
    ids=["ingress", "default", "everything", "ingress, two", "two", "everything, two"],
)
def test_network_policies_allow_the_connection_matrix_and_no_more(
    options: Sequence[str], further: set[tuple[str, str, str]]
) -> None:
    manifests = render(*options, "--set", "transferqueue.shards=3")
    labels = _labels(pods(manifests))
    policies = _policies(manifests)
    components = (
        "controller",
        "transferqueue",
        "transferqueue-shard",
        "trainer",
        "rollout",
        "test",
    )
    allowed = {
        (source, target, port)
        for source, target in itertools.product(components, components[:-1])
        for port in ("grpc", "data")
        if port in _SERVED[target] and _allows(policies, labels[source], labels[target], port)
    }
    assert allowed == _CONNECTIONS | further


def test_only_the_transferqueue_reaches_the_peers_that_it_has() -> None:
    peers = [{"ipBlock": {"cidr": "198.51.100.0/24"}}]
    value = f"networkPolicy.egress.transferqueueTo={json.dumps(peers)}"
    manifests = render(*EVERYTHING, "--set-json", value)
    policies = [p for p in _policies(manifests) if {"to": peers} in p.get("egress", ())]
    reaching = {
        component
        for component, labels in _labels(pods(manifests)).items()
        if any(_matches(policy["podSelector"], labels) for policy in policies)
    }
    assert reaching == {"transferqueue"}


def test_the_code_of_runs_reaches_only_what_the_installation_names() -> None:
    manifests = render(*EVERYTHING)
    policies = _policies(manifests)
    reached = {
        component: [
            rule
            for policy in policies
            if policy["policyTypes"] == ["Egress"] and _matches(policy["podSelector"], labels)
            for rule in policy["egress"]
        ]
        for component, labels in _labels(pods(manifests)).items()
    }
    (own_rule,) = [rule for rule in reached["rollout"] if "podSelector" in str(rule)]
    named = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    anywhere = {
        component: {item["port"] for rule in rules if "to" not in rule for item in rule["ports"]}
        for component, rules in reached.items()
    }
    assert own_rule in reached["controller"]
    assert [named in reached[component] for component in ("trainer", "rollout")] == [True, True]
    assert named not in reached["controller"]
    assert anywhere["rollout"] == anywhere["trainer"] == {4317}
    assert anywhere["controller"] == {4317, 443, 6443}
    assert reached["fetch"] == [], "no policy holds it back"


def test_workers_reach_those_of_their_own_run_and_of_no_other() -> None:
    manifests = render()
    run_policies = [run_policy(run_id, owner={}) for run_id in ("run_a", "run_b")]
    for policy in run_policies:
        policy["metadata"]["namespace"] = "train-workers"
    policies = _policies([*manifests, *run_policies])
    labels = {
        (run_id, role): {**kind, "slipstream.dev/run": run_id}
        for run_id in ("run_a", "run_b")
        for role, kind in _labels(worker_templates(manifests)).items()
    }
    for (source, target), port in itertools.product(
        itertools.product(labels, labels), ("grpc", "collective")
    ):
        is_open = _allows(policies, labels[source], labels[target], port)
        assert is_open == (source[0] == target[0]), (source, target, port)


def test_workers_reach_nothing_outside_unless_the_installation_names_it() -> None:
    manifests = render()
    policies = [policy for policy in _policies(manifests) if "Egress" in policy["policyTypes"]]
    for labels in _labels(worker_templates(manifests)).values():
        rules = [
            rule
            for policy in policies
            if _matches(policy["podSelector"], labels)
            for rule in policy["egress"]
        ]
        assert rules, "no policy would let everything through"
        for rule in rules:
            ports = {item["port"] for item in rule.get("ports", [])}
            assert "to" in rule
            assert ports == {53} or all("ipBlock" not in peer for peer in rule["to"])


def test_names_are_resolved_by_the_clusters_servers_only() -> None:
    for options, peers in (
        ((), [{"namespaceSelector": {"matchLabels": {_NAMESPACE: "kube-system"}}}]),
        (
            ("--set-json", 'networkPolicy.egress.dnsTo=[{"ipBlock": {"cidr": "10.0.0.10/32"}}]'),
            [{"ipBlock": {"cidr": "10.0.0.10/32"}}],
        ),
    ):
        rules = [
            rule
            for policy in _policies(render(*options))
            for rule in policy.get("egress", [])
            if 53 in {item["port"] for item in rule.get("ports", [])}
        ]
        assert len(rules) == 2
        for rule in rules:
            assert rule["to"][: len(peers)] == peers


def test_pods_on_the_nodes_network_leave_its_ports_alone() -> None:
    for template in worker_templates(render("--set", "workers.hostNetwork=true")).values():
        assert "sysctls" not in template["spec"]["securityContext"]


def test_pods_of_other_namespaces_are_refused_regardless_of_labels() -> None:
    manifests = render()
    policies = _policies(manifests)
    labels = _labels(pods(manifests))
    for source, target, port in _CONNECTIONS & set(itertools.product(labels, labels, ["grpc"])):
        assert _allows(policies, labels[source], labels[target], port)
        elsewhere = {**labels[source], _NAMESPACE: "elsewhere"}
        assert not _allows(policies, elsewhere, labels[target], port), (source, target)


def test_workers_in_the_namespace_of_a_project_have_the_same_connections_and_no_more() -> None:
    vision = ("--set", "workers.projects.vision.namespace=vision,transferqueue.shards=3")
    policies = _policies(render(*vision))
    labels = _labels(pods(render(*vision)))
    for source, target, port in _CONNECTIONS:
        for namespace, is_open in (("vision", True), ("elsewhere", False)):
            ends = [
                {**labels[end], _NAMESPACE: namespace}
                if end in ("trainer", "rollout")
                else labels[end]
                for end in (source, target)
            ]
            is_moved = {"trainer", "rollout"} & {source, target}
            assert _allows(policies, *ends, port) == (is_open or not is_moved)
    for first, other in itertools.permutations(
        (labels["trainer"], {**labels["rollout"], _NAMESPACE: "vision"})
    ):
        assert not _allows(policies, first, other, "grpc"), "runs of two projects"


@pytest.mark.parametrize(
    ("options", "open_to"),
    [((), ["monitoring"]), (("--set", "networkPolicy.metricsFrom=null"), [])],
    ids=["default", "nobody"],
)
def test_metrics_are_open_to_the_namespace_of_prometheus_only(
    options: Sequence[str], open_to: list[str]
) -> None:
    policies = _policies(render(*options, "--set", "transferqueue.shards=3"))
    rules = [
        rule
        for policy in policies
        for rule in policy.get("ingress", [])
        if {"port": "metrics", "protocol": "TCP"} in rule.get("ports", [])
    ]
    assert len(rules) == 4
    for rule in rules:
        whole = [peer for peer in rule["from"] if "podSelector" not in peer]
        assert [peer["namespaceSelector"]["matchLabels"][_NAMESPACE] for peer in whole] == open_to
        (test,) = (peer for peer in rule["from"] if "podSelector" in peer)
        labels = test["podSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == "test"


def _labels(pods_by_component: dict[str, Manifest]) -> dict[str, dict[str, str]]:
    """Returns the labels of pods by component, with the pod's namespace as an additional label."""
    ours = ("trainer", "rollout", "fetch")
    return {
        component: {
            **pod["metadata"]["labels"],
            _NAMESPACE: "train-workers" if component in ours else "train",
        }
        for component, pod in pods_by_component.items()
    }


def _policies(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Returns the specs of policies, with their namespace in pod selectors and as default of peers."""
    policies = []
    for manifest in manifests:
        if manifest["kind"] == "NetworkPolicy":
            namespace = {_NAMESPACE: manifest["metadata"]["namespace"]}
            spec = manifest["spec"]
            spec["podSelector"].setdefault("matchLabels", {}).update(namespace)
            for rule in (*spec.get("ingress", []), *spec.get("egress", [])):
                for peer in (*rule.get("from", []), *rule.get("to", [])):
                    if "podSelector" in peer:
                        peer.setdefault("namespaceSelector", {"matchLabels": namespace})
            policies.append(spec)
    return policies


def _allows(
    policies: list[Manifest], source: dict[str, str], target: dict[str, str], port: str
) -> bool:
    """Returns True if the policies allow a connection between two pods; without policies all are allowed."""
    return _opens(policies, "from", target, source, port) and _opens(
        policies, "to", source, target, port
    )


def _opens(
    policies: list[Manifest], side: str, pod: dict[str, str], peer: dict[str, str], port: str
) -> bool:
    """Returns True if a pod's own policies allow connections from (``from``) or to (``to``) a peer."""
    direction = {"from": "ingress", "to": "egress"}[side]
    on_pod = [p for p in policies if direction in p and _matches(p["podSelector"], pod)]
    if not on_pod:
        return True
    for rule in itertools.chain.from_iterable(policy[direction] for policy in on_pod):
        ports = {item["port"] for item in rule.get("ports", [])}
        peers = rule.get(side)
        if (not ports or port in ports) and (
            peers is None
            or any(
                _matches(selector["podSelector"], peer)
                and _matches(selector["namespaceSelector"], peer)
                for selector in peers
                if "podSelector" in selector
            )
        ):
            return True
    return False


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", []):
        if (labels.get(rule["key"]) in rule["values"]) != (rule["operator"] == "In"):
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
