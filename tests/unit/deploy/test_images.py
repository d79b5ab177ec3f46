"""Tests of the Dockerfile and bake.json: lint, and properties that the chart and the security guide state."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.helpers.chart import CHART, ROOT, pods, render
from tests.helpers.images import DOCKERFILE, FOLDER, IMAGES, stage_of, stages_of_file, target_of
from tests.helpers.tools import require

# These rules require pinned versions, but the build reads version ranges of packages from pyproject.toml.
_IGNORED = ("DL3013", "DL3006")
_WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text(encoding="utf-8"))


def test_there_is_an_image_for_each_service_and_engine_of_the_chart() -> None:
    used = {"rollout", "rollout-sglang", "local"}
    for pod in pods(render("--set", "trackers.enabled=true,trackers.existingSecret=keys")).values():
        for container in pod["spec"]["containers"]:
            registry, name, tag = re.fullmatch(
                r"(.*)/slipstream/(.*):(.*)", container["image"]
            ).groups()
            assert registry == "ghcr.io/slipstream-rl"
            assert tag == yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
            used.add(name)
    assert used == set(IMAGES)


def test_the_registry_of_all_images_is_one_value() -> None:
    for value in ("image.registry", "global.imageRegistry"):
        for pod in pods(render("--set", f"{value}=registry.example.com/mirror")).values():
            for container in pod["spec"]["containers"]:
                assert container["image"].startswith("registry.example.com/mirror/slipstream/")


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(sys.executable.rpartition("/")[0]))
    assert program is not None, "it comes with the extra dev"
    ignored = [f"--ignore={rule}" for rule in _IGNORED]
    result = subprocess.run(
        [program, *ignored, DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_bake_builds_each_image_under_the_name_that_the_chart_pulls() -> None:
    (buildx,) = require("docker-buildx")
    result = subprocess.run(
        [buildx, "bake", "--file", FOLDER / "bake.json", "--print"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={"REGISTRY": "registry.example.com/", "TAG": "1.2.3", "HOME": "/nonexistent"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    targets = json.loads(result.stdout)["target"]
    assert set(targets) == set(IMAGES)
    for name, target in targets.items():
        assert target["tags"] == [f"registry.example.com/slipstream/{name}:1.2.3"]
        assert target["target"] == target_of(name)["target"]
        assert target.get("args", {}) == target_of(name)["args"]


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_pinned_and_run_without_root(image: str) -> None:
    base = target_of(image)["args"].get("BASE", _default_base())
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+[A-Za-z0-9.-]*", base)
    lines = stage_of(image)
    assert "USER 10001:10001" in lines
    assert "ENTRYPOINT []" in lines
    assert not [line for line in lines if line.startswith("RUN ")], "nothing is installed as root"
    assert lines[-1].startswith('CMD ["python", "-m", "services.common.start", "services.')


def test_a_change_of_code_changes_only_the_layers_above_the_dependencies() -> None:
    stages = stages_of_file()
    copied = [line for line in stages["dependencies"] if line.startswith("COPY ")]
    assert copied == ["COPY pyproject.toml constraints.txt LICENSE ./"]
    layers = [line for line in stages["program"] if line.startswith("COPY ")]
    assert layers[0] == "COPY --from=dependencies /opt/environment /opt/environment"


def test_a_release_publishes_every_image_with_provenance_and_packages() -> None:
    job = _WORKFLOW["jobs"]["images"]
    assert set(job["strategy"]["matrix"]["image"]) == set(IMAGES)
    (bake,) = [step["with"] for step in job["steps"] if "bake-action" in step.get("uses", "")]
    assert bake["files"] == "deploy/docker/bake.json"
    assert (bake["push"], bake["provenance"], bake["sbom"]) == (True, "mode=max", True)


def _default_base() -> str:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    return base
