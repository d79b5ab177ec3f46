"""Tests of the release workflow: what a tag publishes, under which names, and with which rights."""

import os
import subprocess
import tomllib

import pytest
import yaml

from tests.helpers.chart import CHART, ROOT

_WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text(encoding="utf-8"))
_JOBS = _WORKFLOW["jobs"]
_PROJECTS = {"slipstream": ROOT, "slipstream-rl-client": ROOT / "services" / "client"}


@pytest.mark.parametrize("name", _PROJECTS)
def test_packages_have_the_version_of_the_chart(name: str) -> None:
    project = tomllib.loads((_PROJECTS[name] / "pyproject.toml").read_text())["project"]
    assert project["name"] == name
    assert project["version"] == yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(("suffix", "code"), [("", 0), ("9", 1)], ids=["the version", "another"])
def test_a_tag_must_have_the_version_of_packages_and_chart(suffix: str, code: int) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (check,) = [
        step["run"] for step in _JOBS["build"]["steps"] if "Check that" in step.get("name", "")
    ]
    checked = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", check],
        cwd=ROOT,
        env={**os.environ, "GITHUB_REF_NAME": f"v{version}{suffix}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == code, checked.stderr
    assert ("version must be" in checked.stderr) == bool(code)


def test_nothing_is_published_before_the_packages_are_built_and_tried() -> None:
    assert "needs" not in _JOBS["build"]
    for name in set(_JOBS) - {"build", "chart"}:
        assert _JOBS[name]["needs"] == "build", name
    assert _JOBS["chart"]["needs"] == "images"


def test_only_the_jobs_that_publish_have_rights_to_write() -> None:
    assert _WORKFLOW["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in _JOBS.items()}
    assert {name for name, right in rights.items() if "write" in right.values()} == {
        "pypi", "images", "chart", "site"
    }  # fmt: skip
    assert rights["pypi"] == {"id-token": "write"}, "PyPI trusts the workflow; there is no token"


def test_images_without_an_engine_run_on_both_architectures() -> None:
    platforms = dict.fromkeys(_JOBS["images"]["strategy"]["matrix"]["image"], "")
    for entry in _JOBS["images"]["strategy"]["matrix"]["include"]:
        for image in [entry["image"]] if "image" in entry else platforms:
            platforms[image] = entry["platforms"]
    engines = {"rollout-vllm", "rollout-sglang"}
    assert {image for image, value in platforms.items() if value == "linux/amd64"} == engines
    assert {platforms[image] for image in platforms.keys() - engines} == {"linux/amd64,linux/arm64"}
