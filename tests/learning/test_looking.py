"""A tiny model learns to look: held-out accuracy of `examples/looking` from chance."""

import json

import pytest

from tests.helpers.cli import REPOSITORY, descendants, started

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(1900)]

LOOKING = REPOSITORY / "examples" / "looking" / "looking.yaml"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_model_learns_to_look_although_a_rollout_is_killed(tmp_path, seed):
    run = ("run", LOOKING, "--json", "--state-directory", tmp_path, "--set", f"seed={seed}")
    with started(*run, until=r"step +20/") as (process, _):
        found = descendants(process)
        next(each for name, each in found.items() if name.startswith("rollout")).kill()
        process.communicate(timeout=1800)
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["heldout"]["greedy"] >= 0.9
    assert summary["staleness"]["max"] == 1
    assert summary["prompts"]["quarantined"] == 0
