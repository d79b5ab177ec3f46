"""The best checkpoint of a run is kept and exported after newer ones replace its neighbours."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.cli import slipstream
from tests.helpers.plumbing import PLUMBING

pytestmark = pytest.mark.timeout(300)

# The score of held-out responses rises and falls regardless of their text.
# The command calls the function four times before the run.
_UP_AND_DOWN = """
from pathlib import Path


def score(prompt, response, answer, row):
    with Path(__file__).with_suffix(".calls").open("a+") as calls:
        calls.write("x")
        return float(-abs(calls.tell() - 7))
"""


def test_the_best_checkpoint_outlives_newer_ones_and_is_exported(system, plumbing, tmp_path):
    (plumbing.parent / "upward.py").write_text(_UP_AND_DOWN)
    train = PLUMBING["data"]["train"]
    sets = {
        "scored": {**train, "limit": 1, "rewards": [{"name": "upward.py:score"}]},
        "other": {**train, "limit": 1},
    }
    checkpoint = {"every": 2, "keep": 1, "best": {"set": "scored", "metric": "greedy"}}
    spec = {
        **PLUMBING,
        "data": {**PLUMBING["data"], "heldout": {**sets}},
        "trainer": {"steps": 10, "prompts_per_step": 4, "checkpoint": checkpoint},
        "validation": {"every": 2, "before_train": False, "mode": "barrier"},
    }
    for split in sets.values():
        split["samples_per_prompt"] = 0
    plumbing.write_text(yaml.safe_dump(spec))
    result = system.train(plumbing)
    assert result.code == 0, result.out + result.err
    # The third of five evaluations was the best one.
    assert result.summary["best"] == {"step": 6, "weight_version": 6, "score": 0.0}
    folders = Path(result.folder, "checkpoints").glob("step-*")
    assert sorted(int(path.name.removeprefix("step-")) for path in folders) == [6, 10]
    name = result.folder.name
    listed = slipstream("checkpoints", name, "--url", system.url).out
    assert [line.split()[1] for line in listed.splitlines() if "READY, best" in line] == ["6"]
    exported = slipstream("export", name, tmp_path / "model", "--best", "--url", system.url)
    assert exported.code == 0, exported.err
    assert "step-00000006" in exported.err
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen2"
