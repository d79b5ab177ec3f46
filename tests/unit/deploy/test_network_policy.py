"""The network policies, evaluated as a network plugin would."""

import itertools
from collections.abc import Sequence

import pytest

from services.controller.launch.worker_pods import run_policy
from tests.helpers.chart import EVERYTHING, Manifest, pods, render, worker_templates

# Who may open a connection to whom: (from, to, port).
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
_SERVED = {
    "controller": {"grpc"},
    "transferqueue": {"grpc", "data"},
    "transferqueue-shard": {"data"},
    "trainer": {"grpc"},
    "rollout": {"grpc"},
}


@pytest.mark.parametrize(
    "options",
    [("--set", "networkPolicy.egress.enabled=false"), (), EVERYTHING],
    ids=["ingress", "default", "everything"],
)
def test_network_policies_allow_the_connection_matrix_and_no_more(options: Sequence[str]) -> None:
    manifests = render(*options, "--set", "transferqueue.shards=3")
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests).items()}
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
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
    assert allowed == _CONNECTIONS


def test_the_code_of_runs_reaches_only_what_the_installation_names() -> None:
    manifests = render(*EVERYTHING)
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    reached = {
        component: [
            rule
            for policy in policies
            if policy["policyTypes"] == ["Egress"]
            and _matches(policy["podSelector"], pod["metadata"]["labels"])
            for rule in policy["egress"]
        ]
        for component, pod in pods(manifests).items()
    }
    own = {"to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "demo"}}}]}
    named = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    anywhere = {
        component: {item["port"] for rule in rules if "to" not in rule for item in rule["ports"]}
        for component, rules in reached.items()
    }
    assert own in reached["rollout"]
    assert [named in reached[component] for component in ("trainer", "rollout")] == [True, True]
    assert named not in reached["controller"]
    assert anywhere["rollout"] == anywhere["trainer"] == {53, 4317}
    assert anywhere["controller"] == {53, 4317, 443, 6443}
    assert reached["fetch"] == [], "no policy holds it back"


def test_workers_reach_those_of_their_own_run_and_of_no_other() -> None:
    manifests = render()
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    policies += [run_policy(run_id, owner={})["spec"] for run_id in ("run_a", "run_b")]
    kinds = worker_templates(manifests)
    labels = {
        (run_id, role): {**pod["metadata"]["labels"], "slipstream.dev/run": run_id}
        for run_id in ("run_a", "run_b")
        for role, pod in kinds.items()
    }
    for (source, target), port in itertools.product(
        itertools.product(labels, labels), ("grpc", "collective")
    ):
        is_open = _allows(policies, labels[source], labels[target], port)
        assert is_open == (source[0] == target[0]), (source, target, port)


def test_workers_reach_nothing_outside_unless_the_installation_names_it() -> None:
    manifests = render()
    policies = [
        m["spec"]
        for m in manifests
        if m["kind"] == "NetworkPolicy" and "Egress" in m["spec"]["policyTypes"]
    ]
    for pod in worker_templates(manifests).values():
        rules = [
            rule
            for policy in policies
            if _matches(policy["podSelector"], pod["metadata"]["labels"])
            for rule in policy["egress"]
        ]
        assert rules, "no policy would let everything through"
        for rule in rules:
            ports = {item["port"] for item in rule.get("ports", [])}
            assert "to" in rule or ports == {53}
            assert all("ipBlock" not in peer for peer in rule.get("to", []))


def test_pods_on_the_nodes_network_leave_its_ports_alone() -> None:
    for template in worker_templates(render("--set", "workers.hostNetwork=true")).values():
        assert "sysctls" not in template["spec"]["securityContext"]


def _allows(
    policies: list[Manifest], source: dict[str, str], target: dict[str, str], port: str
) -> bool:
    """Whether the policies let one pod reach a port of another; no policy at all lets everybody."""
    return _opens(policies, "from", target, source, port) and _opens(
        policies, "to", source, target, port
    )


def _opens(
    policies: list[Manifest], side: str, pod: dict[str, str], peer: dict[str, str], port: str
) -> bool:
    """Whether a pod may be reached from, or go to, another one."""
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
                _matches(found["podSelector"], peer) for found in peers if "podSelector" in found
            )
        ):
            return True
    return False


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    excluded = any(
        rule["operator"] == "NotIn" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", [])
    )
    return not excluded and bool(selector["matchLabels"].items() <= labels.items())
