"""Renders the Helm chart for tests."""

import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.tools import require

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "slipstream"
PROFILES = CHART / "profiles"

Manifest = dict[str, Any]


def helm(*arguments: str, version: str = "helm4") -> subprocess.CompletedProcess[str]:
    """Runs Helm."""
    (program,) = require(version)
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def render(
    *arguments: str,
    profiles: Sequence[str] = (),
    kube_version: str = "1.33.0",
    version: str = "helm4",
) -> list[Manifest]:
    """Returns all manifests of release ``demo`` in namespace ``train``, with workers in ``train-workers``."""
    files = [argument for name in profiles for argument in ("-f", str(PROFILES / f"{name}.yaml"))]
    text = _rendered(version, "--kube-version", kube_version, *files, *arguments)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@lru_cache
def _rendered(version: str, *arguments: str) -> str:
    result = helm("template", "demo", str(CHART), "-n", "train", *arguments, version=version)
    assert result.returncode == 0, result.stderr
    return result.stdout


def one(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Returns the only manifest with a kind and a name."""
    matching = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    assert len(matching) == 1, f"{len(matching)} manifests are {kind} {name}"
    return matching[0]


def worker_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Returns the pod templates of workers, by role."""
    data = one(manifests, "ConfigMap", "demo-slipstream-workers")["data"]
    return {
        role: yaml.load(data[f"{role}.yaml"], yaml.CSafeLoader) for role in ("trainer", "rollout")
    }


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Returns all pods that the release can create, by component: ``{"metadata": ..., "spec": ...}``."""
    result = dict(worker_templates(manifests))
    for manifest in manifests:
        pod = manifest if manifest["kind"] == "Pod" else manifest.get("spec", {}).get("template")
        if isinstance(pod, dict) and "containers" in pod.get("spec", {}):
            result[pod["metadata"]["labels"]["app.kubernetes.io/component"]] = pod
    return result


EVERYTHING = (
    "--set-json",
    'ingress.enabled=true,ingress.tls={"enabled": true, "issuer": "letsencrypt"}',
    "--set-json",
    'httpRoute={"enabled": true, "parentRefs": [{"name": "gateway"}]}',
    "--set",
    "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true",
    "--set",
    "monitoring.dashboards.enabled=true",
    "--set",
    "trackers.enabled=true,trackers.existingSecret=tracker-keys",
    "--set",
    "tracing.endpoint=http://collector.tracing.svc:4317",
    "--set",
    "workers.modelCache.existingClaim=models,workers.modelCache.fetch={Qwen/Qwen3-4B@main}",
    "--set-json",
    'networkPolicy.egress={"enabled": true, "workersTo": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}',
)
"""Enables everything that is off by default."""

EXISTING = (
    "--set",
    "serviceKey.existingSecret=key,controller.adminToken.existingSecret=token,tls.mode=existing",
)
"""Takes all secrets from existing secrets."""
