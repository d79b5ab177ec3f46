"""The Dockerfiles: lint, and properties that the chart and the security guide state."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT, pods, render

DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
# Versions of what pip installs are ranges of pyproject.toml, which the build reads.
_IGNORED = ("DL3013", "DL3006")


def name_of(path: Path) -> str:
    return path.name.removesuffix(".Dockerfile")


def test_there_is_an_image_for_each_service_and_engine() -> None:
    assert {name_of(path) for path in DOCKERFILES} == {
        "controller", "transferqueue", "trainer", "rollout", "rollout-vllm", "rollout-sglang", "local",
    }  # fmt: skip
    known = {name_of(path) for path in DOCKERFILES}
    for pod in pods(render()).values():
        for container in pod["spec"]["containers"]:
            assert re.sub(r".*/|:.*", "", container["image"]) in known


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_hadolint_finds_nothing(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program is not None, "it comes with the extra dev"
    ignored = [f"--ignore={rule}" for rule in _IGNORED]
    done = subprocess.run([program, *ignored, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_images_are_pinned_have_two_stages_and_run_without_root(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"ARG BASE=[a-z0-9./-]+:v?\d+\.\d+[A-Za-z0-9.-]*", base)
    stages = [line for line in lines if line.startswith("FROM ")]
    assert stages == ["FROM ${BASE} AS dependencies", "FROM ${BASE}"]
    final = lines[lines.index("FROM ${BASE}") :]
    assert "USER 10001:10001" in final
    assert not [line for line in final if line.startswith("RUN ")], "nothing is installed as root"
    assert final[-1].startswith('CMD ["python", "-m", "services.')
    assert ("ENTRYPOINT []" in final) is path.name.startswith("rollout-")
