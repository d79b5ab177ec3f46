"""A trainer of two ranks on one machine: the ranks end together, and the run continues."""

import json
import re

import pytest
import torch

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from tests.helpers.cli import assert_all_gone, ranks_of, slipstream, started

pytestmark = pytest.mark.timeout(300)


def test_two_ranks_apart_or_in_turns_train_what_one_rank_trains(plumbing, system):
    """Compares a colocated run with a trainer of two ranks, and that with a trainer of one rank."""
    in_turns = (
        "topology.placement=colocated",
        "rollout.replicas=2",
        "trainer.checkpoint.every=1",
        "validation.every=1",
    )
    trained = []
    for ranks, settings in ((1, ()), (2, ()), (2, in_turns)):
        overrides = (f"trainer.world_size={ranks}", "algorithm.max_staleness=0", *settings)
        result = system.train(plumbing, *overrides)
        assert result.code == 0, result.out + result.err
        steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
        assert all(("gpu_switch_s" in step) == (settings is in_turns) for step in steps)
        trained.append([(step["reward_mean"], step["grad_norm"]) for step in steps])
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]
    assert trained[1] == [pytest.approx(step, abs=1e-4) for step in trained[2]]


@pytest.mark.nightly
def test_adapters_train_the_same_sent_merged_or_alone(plumbing, system, tmp_path):
    base = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")
    tokenizer = load_tokenizer(base)
    config = load_config(base, tokenizer)
    build_model(config, dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    model = f"model={{path: {tmp_path / 'model'}}}"
    trained = []
    for ranks, sync in ((1, "merged"), (2, "adapter")):
        lora = f"trainer.lora={{rank: 4, sync: {sync}}}"
        overrides = (f"trainer.world_size={ranks}", "algorithm.max_staleness=0", lora, model)
        result = system.train(plumbing, *overrides)
        assert result.code == 0, result.out + result.err
        steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
        trained.append([(step["reward_mean"], step["loss"]) for step in steps])
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]


@pytest.mark.nightly
def test_two_ranks_that_share_packs_train_what_one_trains(plumbing, system):
    trained = []
    for options in ({}, {"world_size": 2, "context_parallel": 2}):
        overrides = [f"trainer.{name}={value}" for name, value in options.items()]
        # GAE, because its critic shares packs too.
        result = system.train(
            plumbing, *overrides, "algorithm.max_staleness=0", "algorithm.advantage=gae"
        )
        assert result.code == 0, result.out + result.err
        steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
        trained.append([(step["reward_mean"], step["loss"]) for step in steps])
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]


def test_packs_that_cannot_be_shared_are_refused_before_the_start(plumbing, tmp_path):
    settings = ("--set", "trainer.world_size=3", "--set", "trainer.context_parallel=3")
    result = slipstream("validate", plumbing, *settings)
    assert result.code != 0
    assert "trainer.context_parallel is 3" in result.out + result.err


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_a_run_continues_after_the_loss_of_a_rank(plumbing, tmp_path, rank):
    settings = ("--set", "trainer.world_size=2", "--set", "trainer.steps=12")
    checkpoints = ("--set", "trainer.checkpoint.every=2")
    arguments = ("run", plumbing, "--json", "--state-directory", tmp_path, *settings, *checkpoints)
    with started(*arguments, until=r"step +4/") as (process, _):
        ranks = ranks_of("trainer-0", tmp_path)
        assert sorted(ranks) == ["0", "1"]
        ranks[rank].kill()
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert_all_gone(ranks)
    assert re.search(r"step +12/", out)


def test_ranks_that_cannot_load_fail_the_run_with_their_last_lines(plumbing, system, tmp_path):
    code = (
        "import os\n\n\ndef examples(count, seed):\n"
        "    if 'RANK' in os.environ:\n        raise KeyError('gold')\n"
        "    return [('1', '2')] * count\n"
    )
    (tmp_path / "broken.py").write_text(code)
    warm_start = f"model.warm_start={{examples: '{tmp_path}/broken.py:examples', steps: 1}}"
    result = system.train(plumbing, "trainer.world_size=2", warm_start)
    assert result.code != 0
    assert "broken.py:examples" in result.out + result.err
    assert "raised KeyError: 'gold'" in result.out + result.err
