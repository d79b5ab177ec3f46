"""Runs of supervised fine-tuning and preference pairs, and reinforcement learning that starts from them."""

import json

import pytest
import yaml

from tests.helpers.cli import slipstream
from tests.helpers.plumbing import PLUMBING, write_dpo, write_sft

pytestmark = pytest.mark.timeout(300)


def test_a_model_is_fine_tuned_exported_and_reinforced(system, plumbing, tmp_path):
    result = system.train(write_sft(tmp_path))
    assert result.code == 0, result.out + result.err
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "reward_mean" not in steps[0]
    # A random model finds all bytes about equally likely; a held-out score is a mean log-probability.
    scores = [step["heldout_greedy"] for step in steps if "heldout_greedy" in step]
    assert scores == sorted(scores)
    assert scores[-1] > scores[0]
    groups = result.summary["prompts"]
    assert groups["consumed"] == 96
    assert groups["quarantined"] == 2
    exported = slipstream("export", result.folder.name, tmp_path / "base", "--url", system.url)
    assert exported.code == 0, exported.err
    lora = {"rank": 4, "base_dtype": "nf4"}
    trainer = {**PLUMBING["trainer"], "lora": lora}
    document = {**PLUMBING, "model": {"path": "base"}, "trainer": trainer}
    plumbing.write_text(yaml.safe_dump(document))
    adapted = system.train(plumbing)
    assert adapted.code == 0, adapted.out + adapted.err
    assert adapted.summary["steps"] == 3
    steps = [
        json.loads(line) for line in (adapted.folder / "metrics.jsonl").read_text().splitlines()
    ]
    # The engine serves the weights that the trainer rounded.
    assert all(step["rollout_logprob_abs_diff"] < 1e-3 for step in steps)


def test_a_run_without_rollouts_sends_no_weights(system, tmp_path):
    path = write_sft(tmp_path)
    spec = yaml.safe_load(path.read_text())
    del spec["data"]["heldout"], spec["validation"]
    path.write_text(yaml.safe_dump({**spec, "trainer": {**spec["trainer"], "steps": 3}}))
    finished_run = system.train(path)
    assert finished_run.code == 0, finished_run.out + finished_run.err
    assert (finished_run.summary["steps"], finished_run.summary["weight_version"]) == (3, 3)
    result = slipstream("events", finished_run.folder.name, "--url", system.url)
    assert "weight version 3 has no receivers" in result.out


def test_pairs_of_answers_teach_which_is_preferred(system, tmp_path):
    result = system.train(write_dpo(tmp_path))
    assert result.code == 0, result.out + result.err
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["preference_margin"] > steps[0]["preference_margin"]
    assert steps[-1]["preference_accuracy"] == 1
    assert result.summary["prompts"]["quarantined"] == 2
    assert result.summary["heldout"]["sets"]["heldout"]["reward/preferred"] == 1
