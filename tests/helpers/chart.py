"""Renders the Helm chart for tests.

What Helm printed is stored in ``.pytest_cache`` until it or the chart changes.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.tools import require

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "slipstream"
PROFILES = CHART / "profiles"
_RESULTS = ROOT / ".pytest_cache" / "helm"

Manifest = dict[str, Any]


def helm(*arguments: str, version: str = "helm4") -> subprocess.CompletedProcess[str]:
    """Runs Helm, or returns the result of an equal command on an equal chart."""
    (program,) = require(version)
    result_file = _results(program) / f"{sha256(json.dumps(arguments).encode()).hexdigest()}.json"
    depends_on_chart_only = arguments[0] in ("template", "lint") and not any(
        map(_is_other_file, arguments)
    )
    if depends_on_chart_only and result_file.exists():
        return subprocess.CompletedProcess(
            [program, *arguments], **json.loads(result_file.read_text())
        )
    # A process of a tenth of a second needs no garbage collection, which takes a quarter of its time.
    environment = {**os.environ, "GOGC": "off"}
    result = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if depends_on_chart_only:
        content = {
            "returncode": result.returncode,
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
        new = result_file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(content))
        new.replace(result_file)
    return result


def _is_other_file(argument: str) -> bool:
    path = Path(argument.rpartition("=")[2])
    try:
        return path.is_file() and not path.is_relative_to(CHART)
    except (OSError, ValueError):  # a text that cannot be a path
        return False


@lru_cache
def _results(program: Path) -> Path:
    """Returns the folder of results for this Helm and the current chart; deletes those of other charts."""
    state = sha256(f"{program} {program.stat().st_size} {program.stat().st_mtime_ns}".encode())
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            state.update(f"{path.relative_to(CHART)} {path.stat().st_size} ".encode())
            state.update(path.read_bytes())
    folder = _RESULTS / program.name / state.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.parent.iterdir():
        if entry != folder:
            shutil.rmtree(entry, ignore_errors=True)
    return folder


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
