"""Configuration files of the node's programs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.network import NODE_IP, SECOND_NODE_IP
from tests.helpers.tools import CACHE

DNS_IP = "10.96.0.10"
_PAUSE = "localhost/pause:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings in which two nodes of one machine differ."""

    name: str
    ip: str
    pods: str
    """Addresses of its pods."""
    bridge: str
    """Network device of its pods."""
    containers: str
    """Folder of its containers and images in the cache, which outlives the session."""
    kubelet: dict[str, Any]
    """Further settings of its kubelet."""


FIRST = NodeConfig(
    name="node-1",
    ip=NODE_IP,
    pods="10.244.0.0/24",
    bridge="cni0",
    containers="containerd",
    kubelet={},
)
SECOND = NodeConfig(
    name="node-2",
    ip=SECOND_NODE_IP,
    pods="10.244.1.0/24",
    bridge="cni1",
    containers="containerd-2",
    kubelet={
        "healthzPort": 10258,
        # The control groups and the folder of plugins belong to the kubelet of the first node.
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "featureGates": {"DevicePlugins": False},
    },
)


def containerd_config(folder: Path, node: NodeConfig, socket: Path) -> Path:
    """Writes the configuration of containerd, with a bridge as the pods' network; returns its path."""
    containers = CACHE / node.containers
    networks = folder / "cni"
    networks.mkdir()
    plugins = CACHE / "root" / "usr" / "lib" / "cni"
    bridge = {
        "type": "bridge",
        "bridge": node.bridge,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pods}]],
            "dataDir": str(folder / "ipam"),
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    network = {"cniVersion": "0.3.1", "name": "pods", "plugins": [bridge, ports]}
    (networks / "10-bridge.conflist").write_text(json.dumps(network), encoding="utf-8")
    path = folder / "containerd.toml"
    path.write_text(
        f"""version = 2
root = "{containers}/root"
state = "{folder}/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
""",
        encoding="utf-8",
    )
    return path


def kubelet_config(folder: Path, node: NodeConfig, authority: Path) -> Path:
    """Writes the configuration of the kubelet; returns its path.

    Args:
        authority: Certificate of the authority that signed those of the kubelet's clients.
    """
    resolv = folder / "resolv.conf"
    resolv.write_text("", encoding="utf-8")
    path = folder / "kubelet.yaml"
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.ip,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_IP],
        "resolvConf": str(resolv),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        # The secrets and states of all pods share the limit, by default 5 requests per second.
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
        # A mounted secret changes at the pod's next sync, by default once a minute.
        "syncFrequency": "10s",
        **node.kubelet,
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
