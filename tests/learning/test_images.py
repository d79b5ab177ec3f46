"""Tiny models learn from images in prompts and observations: held-out accuracy, which starts at chance."""

import json

import pytest

from tests.helpers.cli import REPOSITORY, descendants, started

pytestmark = [pytest.mark.learning, pytest.mark.nightly]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("example", ["images.yaml", "looking/looking.yaml"])
@pytest.mark.timeout(900)
def test_a_tiny_model_learns_from_images_although_a_rollout_is_killed(tmp_path, example, seed):
    spec = REPOSITORY / "examples" / example
    run = ("run", spec, "--json", "--state-directory", tmp_path, "--set", f"seed={seed}")
    with started(*run, until=r"step +20/") as (process, _):
        workers = descendants(process)
        next(worker for name, worker in workers.items() if name.startswith("rollout")).kill()
        process.communicate(timeout=800)
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["heldout"]["greedy"] >= 0.9
    assert summary["staleness"]["max"] == 1
    assert summary["prompts"]["quarantined"] == 0
