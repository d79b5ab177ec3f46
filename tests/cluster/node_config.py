"""Configuration files of the node's programs."""

import json
from pathlib import Path

import yaml

from tests.cluster.network import NODE_IP, POD_RANGE
from tests.helpers.tools import CACHE

DNS_IP = "10.96.0.10"
_PAUSE = "localhost/pause:1"


def containerd_config(folder: Path, containers: Path, socket: Path) -> Path:
    """Writes the configuration of containerd, with a bridge as the pods' network; returns its path."""
    networks = folder / "cni"
    networks.mkdir()
    plugins = CACHE / "root" / "usr" / "lib" / "cni"
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": POD_RANGE}]],
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


def kubelet_config(folder: Path) -> Path:
    """Writes the configuration of the kubelet; returns its path."""
    resolv = folder / "resolv.conf"
    resolv.write_text("", encoding="utf-8")
    path = folder / "kubelet.yaml"
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "pki" / "ca.crt")},
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
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
