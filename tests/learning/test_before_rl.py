"""Held-out scores of fine-tuning, preference pairs, a reward model and distillation, and of RL after them."""

import json
from runpy import run_path

import pytest

from services.extras.reward_services.classifier import Classifier
from tests.helpers.cli import REPOSITORY, SORT4, run_module, train

pytestmark = [pytest.mark.nightly, pytest.mark.learning, pytest.mark.timeout(900)]

SFT = REPOSITORY / "examples" / "sft.yaml"
DPO = REPOSITORY / "examples" / "dpo.yaml"
REWARD_MODEL = REPOSITORY / "examples" / "reward_model.yaml"
DISTILL = REPOSITORY / "examples" / "distill.yaml"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demonstrations_teach_to_sort_and_rewards_improve_further(tmp_path, seed):
    result = train(SFT, tmp_path, f"seed={seed}")
    assert result.code == 0, result.out + result.err
    heldout = result.summary["heldout"]
    assert heldout["greedy"] >= 0.85
    assert heldout["sampled"] >= 0.55
    (checkpoint,) = (result.folder / "checkpoints").iterdir()
    base = tmp_path / "base"
    run_module("services.extras.export.checkpoint", checkpoint, SFT, base)
    rewarded = train(SORT4, tmp_path, f"model={{path: {base}}}", f"seed={seed}")
    assert rewarded.code == 0, rewarded.out + rewarded.err
    lines = (rewarded.folder / "metrics.jsonl").read_text().splitlines()
    assert "heldout_greedy" in json.loads(lines[-1])
    assert rewarded.summary["heldout"]["sampled"] >= heldout["sampled"] + 0.05


def test_pairs_of_answers_teach_to_sort(tmp_path):
    result = train(DPO, tmp_path)
    assert result.code == 0, result.out + result.err
    assert result.summary["heldout"]["greedy"] >= 0.7
    assert result.summary["heldout"]["sampled"] >= 0.45


def test_a_reward_model_prefers_sorted_digits_that_it_has_not_seen(tmp_path):
    result = train(REWARD_MODEL, tmp_path)
    assert result.code == 0, result.out + result.err
    (checkpoint,) = (result.folder / "checkpoints").iterdir()
    folder = tmp_path / "model"
    run_module("services.extras.export.checkpoint", checkpoint, REWARD_MODEL, folder)
    classifier, right = Classifier(str(folder)), []
    for row in run_path(str(REWARD_MODEL.parent / "sort4.py"))["heldout"]():
        digits = row["prompt"].removesuffix("=")
        for wrong in (digits, digits[::-1]):
            texts = [classifier.tokens(row["prompt"], answer) for answer in (row["answer"], wrong)]
            chosen, rejected = classifier.scores(texts)
            right.append(chosen > rejected)
    assert sum(right) >= 0.9 * len(right)


def test_a_teacher_alone_teaches_to_sort(tmp_path):
    result = train(DISTILL, tmp_path)
    assert result.code == 0, result.out + result.err
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1]["kl_ref"] < 0.5 * steps[0]["kl_ref"]
    scores = [step["heldout_sampled"] for step in steps if "heldout_sampled" in step]
    assert scores[-1] >= 0.5
