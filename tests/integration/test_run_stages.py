"""A trainer of pipeline stages in whole runs trains what one process trains, and survives a lost stage."""

import json
import re

import pytest

from tests.helpers.cli import assert_all_gone, ranks_of, started

pytestmark = pytest.mark.timeout(300)

STAGES = ("trainer.engine=stages", "trainer.pipeline_parallel=2")


@pytest.mark.parametrize(
    "layout",
    [
        ("trainer.world_size=2",),
        pytest.param(
            ("trainer.world_size=4", "trainer.tensor_parallel=2"), marks=pytest.mark.nightly
        ),
        pytest.param(
            ("trainer.world_size=4", "algorithm.advantage=gae"), marks=pytest.mark.nightly
        ),
        pytest.param(
            ("trainer.world_size=2", "algorithm.kl.coefficient=0.1"), marks=pytest.mark.nightly
        ),
    ],
)
def test_stages_train_what_one_rank_trains(plumbing, system, layout):
    """Rollouts sample from the weights that they received, so equal rewards show equal weights."""
    trained = []
    for settings in (("trainer.world_size=1",), (*STAGES, *layout)):
        algorithm_settings = [setting for setting in layout if setting.startswith("algorithm.")]
        result = system.train(
            plumbing,
            *algorithm_settings,
            *settings,
            "algorithm.max_staleness=0",
            "trainer.tokens_per_micro_batch=64",
        )
        assert result.code == 0, result.out + result.err
        steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
        trained.append([(step["reward_mean"], step["grad_norm"]) for step in steps])
    assert trained[0] == [pytest.approx(step, abs=1e-4) for step in trained[1]]


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_a_run_continues_after_the_loss_of_a_stage(plumbing, tmp_path, rank):
    settings = (*STAGES, "trainer.world_size=2", "trainer.steps=12", "trainer.checkpoint.every=2")
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    arguments = ("run", plumbing, "--json", "--state-directory", tmp_path, *overrides)
    with started(*arguments, until=r"step +4/") as (process, _):
        ranks = ranks_of("trainer-0", tmp_path)
        assert sorted(ranks) == ["0", "1"]
        ranks[rank].kill()
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert_all_gone(ranks)
    assert re.search(r"step +12/", out)
