"""The network policies, evaluated as a network plugin would."""

import itertools

from tests.unit.deploy.chart import Manifest, one, pods, render, worker_templates

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
    ("trainer", "rollout", "grpc"),
    ("rollout", "trainer", "grpc"),
    ("rollout", "rollout", "grpc"),
    ("trainer", "trainer", "grpc"),
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


def test_network_policies_allow_the_connection_matrix_and_no_more() -> None:
    manifests = render("--set", "transferqueue.shards=3")
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


def test_ports_that_workers_kernels_give_out_are_open_between_workers() -> None:
    manifests = render()
    policy = one(manifests, "NetworkPolicy", "demo-slipstream-workers")["spec"]
    (opened,) = [item for item in policy["ingress"][0]["ports"] if "endPort" in item]
    for template in worker_templates(manifests).values():
        (setting,) = template["spec"]["securityContext"]["sysctls"]
        assert setting["name"] == "net.ipv4.ip_local_port_range"
        first, last = map(int, setting["value"].split())
        assert opened["port"] < first < last == opened["endPort"]
    assert opened["port"] == 29500, "torchrun's port"


def test_pods_on_the_nodes_network_leave_its_ports_alone() -> None:
    for template in worker_templates(render("--set", "workers.hostNetwork=true")).values():
        assert "sysctls" not in template["spec"]["securityContext"]


def _allows(
    policies: list[Manifest], source: dict[str, str], target: dict[str, str], port: str
) -> bool:
    """Whether the policies let one pod reach a port of another; no policy at all lets everybody."""
    on_target = [p for p in policies if _matches(p["podSelector"], target)]
    if not on_target:
        return True
    for rule in itertools.chain.from_iterable(policy["ingress"] for policy in on_target):
        ports = {item["port"] for item in rule.get("ports", [])}
        peers = rule.get("from")
        if (not ports or port in ports) and (
            peers is None or any(_matches(peer["podSelector"], source) for peer in peers)
        ):
            return True
    return False


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())
