"""The steps of docs/tutorial.md, as a reader takes them."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from services.common.runspec.loader import load_spec
from tests.helpers.cli import slipstream
from tests.helpers.pages import example

FILES = ("make_data.py", "backwards.py", "backwards.yaml", "use.py")


@pytest.fixture
def folder(tmp_path):
    """Writes the tutorial's files and data; returns their folder."""
    for name in FILES:
        example("tutorial.md", name, tmp_path)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True)
    return tmp_path


def test_its_specification_is_valid(folder):
    checked = slipstream("validate", folder / "backwards.yaml")
    assert checked.code == 0, checked.err
    spec = load_spec(folder / "backwards.yaml")
    assert spec.data.prompt_column == "word"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_learns_and_its_model_is_exported(folder, system):
    result = system.train(folder / "backwards.yaml")
    assert result.code == 0, result.out + result.err
    scores = json.loads((result.folder / "summary.json").read_text())["heldout"]
    assert scores["greedy"] > 0.9
    listing = slipstream("samples", "backwards", "--worst", "--url", system.url)
    assert listing.code == 0, listing.err
    exported = slipstream("export", "backwards", folder / "model", "--url", system.url)
    assert exported.code == 0, exported.err
    with safe_open(folder / "model" / "model.safetensors", "pt") as weights:
        assert "model.norm.weight" in weights.keys()  # noqa: SIM118 -- not a mapping
    used = subprocess.run(
        [sys.executable, "use.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "parameters" in used.stdout, used.stderr
