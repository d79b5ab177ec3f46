"""The built wheel is complete and works in an environment without the repository."""

import os
import re
import site
import subprocess
import sys
import venv
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.helpers.cli import REPOSITORY, SORT4

PAGE = REPOSITORY / "services" / "controller" / "api" / "page"


@dataclass(frozen=True)
class Installed:
    """An installed wheel and the empty folder in which its command runs."""

    slipstream: Path
    folder: Path

    def options(self) -> dict:
        """Returns options of subprocesses, which cannot import the repository."""
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        home = {"HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        return {"cwd": self.folder, "env": variables | home, "text": True}

    def call(self, *arguments: str) -> str:
        """Runs a command, which must succeed; returns its output."""
        result = subprocess.run(
            [self.slipstream, *arguments], capture_output=True, timeout=600, **self.options()
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    @contextmanager
    def up(self):
        """Starts services; yields the link to their page."""
        with subprocess.Popen(
            [self.slipstream, "up", "--port", "0"], stdout=subprocess.PIPE, **self.options()
        ) as process:
            try:
                yield next(match[1] for line in process.stdout if (match := _LINK.search(line)))
            finally:
                process.terminate()
                process.communicate(timeout=60)


_LINK = re.compile(r"run page .*: (\S+)")


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Builds a source distribution, and a wheel from it alone; returns their folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Installed:
    """Installs the wheel in a new environment that can import the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = dist.glob("slipstream-*.whl")
    # Python does not read .pth files in folders that a .pth file adds, so the editable install has no effect.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", wheel], check=True)
    (folder / "empty").mkdir()
    return Installed(folder / "venv" / "bin" / "slipstream", folder / "empty")


def test_an_installed_wheel_writes_its_example_and_finds_it_valid(installed):
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", installed.call("--version"))
    assert "slipstream run sort4.yaml" in installed.call("init", "--example")
    assert (installed.folder / "sort4.yaml").read_text() == SORT4.read_text()
    installed.call("validate", "sort4.yaml")


def test_an_installed_wheel_serves_its_page_from_a_database_that_it_makes(installed):
    with installed.up() as link, httpx.Client(trust_env=False, timeout=30) as http:
        page = http.get(link, follow_redirects=True)
        assert page.status_code == 200
        assert "<title>" in page.text
        for file in (path for path in PAGE.rglob("*") if path.suffix in {".js", ".css", ".svg"}):
            asset = http.get(httpx.URL(link).join(f"/page/{file.relative_to(PAGE)}"))
            assert asset.content == file.read_bytes(), file


@pytest.mark.nightly
def test_an_installed_wheel_trains_its_example(installed):
    installed.call("init", "--example", "--force")
    installed.call("run", "sort4.yaml", "--set", "trainer.steps=3")
