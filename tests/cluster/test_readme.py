"""The commands of the README's section on Kubernetes, as a new user runs them."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.node import Cluster
from tests.cluster.release import CLEARING_S, eventually, has_ended
from tests.helpers.chart import ROOT
from tests.helpers.tools import require

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_NAMESPACE = "readme"
# Differences from the README: no GPU, no registry, and a script must wait until the port is open.
_HERE = {
    "-n slipstream": f"-n {_NAMESPACE}",
    "profiles/one-gpu-node.yaml": "profiles/cpu-smoke.yaml",
    "image.registry=registry.example.com": "image.registry=localhost,image.tag=test",
    "8080 &\n": "8080 &\nuntil (exec 3<>/dev/tcp/127.0.0.1/8080) 2> /dev/null; do sleep 0.2; done\n",
}


def test_a_new_user_installs_and_trains_by_the_readme(machine: Cluster, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## On Kubernetes")[1]
    script = re.search(r"```console\n(.*?)```", section, re.DOTALL)[1]
    for written, meant in _HERE.items():
        assert written in script
        script = script.replace(written, meant)
    (helm,) = require("helm4")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").symlink_to(helm)
    for name in ("deploy", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{machine.processes.path}"
    environment = {
        "PATH": path,
        "HOME": str(tmp_path),
        "KUBECONFIG": str(machine.kubeconfig),
        "PYTHONUNBUFFERED": "1",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p)' EXIT\n{script}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "all services are healthy" in result.stdout
    assert "SUCCEEDED" in result.stdout
    list_pods = partial(machine.core.list_namespaced_pod, f"{_NAMESPACE}-workers")
    pods = partial(list_pods, label_selector="slipstream.dev/run")
    eventually(lambda: all(map(has_ended, pods().items)), timeout_s=CLEARING_S)
    machine.command(helm, "uninstall", "slipstream", "-n", _NAMESPACE)
