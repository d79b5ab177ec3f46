"""Runs with separate workers for logprobs or values: same training, also after the loss of a worker."""

import json

import pytest

from tests.helpers.cli import assert_all_gone, descendants, ranks_of, started

pytestmark = pytest.mark.timeout(300)

KL = ("algorithm.kl.coefficient=0.1", "algorithm.max_staleness=0")
CRITIC = ("algorithm.advantage=gae", "algorithm.max_staleness=0", "trainer.updates_per_step=2")
MINI_BATCHES = ("trainer.updates_per_step=2", "algorithm.max_staleness=0")


def topology(group: str, processes: int = 1, *, trainer: int = 1) -> tuple[str, ...]:
    """Returns settings that give a task its own processes, besides a trainer and two rollouts.

    Several processes are one worker, which shards its model over them.

    Args:
        trainer: Processes of the trainer.
    """
    total = processes + trainer + 2
    ratios = ", ".join(str(count / total) for count in (trainer, processes, 2))
    return (
        f"topology.task_groups=[train, {group}, generate]",
        f"topology.ratios=[{ratios}]",
        f"topology.gpus={total}",
        *((f"topology.scoring_ranks={processes}",) if group != "critic" else ()),
    )


NUMBERS = ("reward_mean", "loss", "grad_norm", "kl_ref", "value_loss")
# Whole weights that arrive through host memory are sharded on the worker.
SHARDED = (*MINI_BATCHES, "weight_sync.mode=cpu_async")
ROLES = [
    pytest.param("ref_logp", 2, KL, marks=pytest.mark.nightly),
    pytest.param("critic", 2, CRITIC),
    pytest.param("logp", 1, MINI_BATCHES, marks=pytest.mark.nightly),
    pytest.param("logp", 2, SHARDED, marks=pytest.mark.nightly),
    pytest.param("ref_logp", 1, KL, marks=pytest.mark.nightly),
]
STAGES = ("trainer.engine=stages", "trainer.pipeline_parallel=2")
TENSOR_2 = ("topology.scoring.tensor_parallel=2",)
OTHER_LAYOUTS = [
    pytest.param("critic", CRITIC, ("critic.tensor_parallel=2",), 1, marks=pytest.mark.nightly),
    pytest.param("critic", CRITIC, ("critic.cpu_offload=true",), 1, marks=pytest.mark.nightly),
    pytest.param(
        "critic", CRITIC, (*STAGES, "critic.pipeline_parallel=2"), 2, marks=pytest.mark.nightly
    ),
    pytest.param("critic", CRITIC, STAGES, 2, marks=pytest.mark.nightly),
    pytest.param("ref_logp", KL, (*STAGES, *TENSOR_2), 2, marks=pytest.mark.nightly),
    pytest.param("logp", SHARDED, (*STAGES, *TENSOR_2), 2),
]
"""Task, its run, its layout on two processes, and the processes of the trainer."""
KILLED_ROLES = [
    pytest.param("logp", 2, SHARDED),
    pytest.param("critic", 2, CRITIC, marks=pytest.mark.nightly),
    pytest.param("ref_logp", 2, KL, marks=pytest.mark.nightly),
]


def trained(result) -> list[list[float]]:
    """Returns the metrics of each step that must not depend on the roles."""
    assert result.code == 0, result.out + result.err
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    return [[step.get(name, 0.0) for name in NUMBERS] for step in steps]


@pytest.mark.parametrize(("group", "processes", "settings"), ROLES)
def test_a_separate_role_changes_no_number(plumbing, system, group, processes, settings):
    alone = trained(system.train(plumbing, *settings, "trainer.steps=4"))
    role_settings = topology(group, processes)
    apart = system.train(plumbing, *settings, *role_settings, "trainer.steps=4")
    assert trained(apart) == [pytest.approx(step, abs=1e-5, rel=1e-4) for step in alone]
    assert (apart.folder / "logs" / f"{group.replace('_', '-')}-0.log").exists()


@pytest.mark.parametrize(("group", "settings", "layout", "ranks"), OTHER_LAYOUTS)
def test_a_role_with_another_layout_than_the_trainer_changes_no_number(
    plumbing, system, group, settings, layout, ranks
):
    alone = trained(system.train(plumbing, *settings, "trainer.steps=4"))
    role_settings = topology(group, 2, trainer=ranks)
    apart = system.train(plumbing, *settings, *role_settings, *layout, "trainer.steps=4")
    assert trained(apart) == [pytest.approx(step, abs=1e-5, rel=1e-4) for step in alone]


@pytest.mark.parametrize(("group", "processes", "settings"), KILLED_ROLES)
def test_a_killed_process_of_a_role_loses_nothing(plumbing, tmp_path, group, processes, settings):
    overrides = (*settings, *topology(group, processes), "trainer.steps=10", "name=killed")
    arguments = [argument for setting in overrides for argument in ("--set", setting)]
    with started(
        "run", plumbing, "--json", "--state-directory", tmp_path, *arguments, until=r"step +3/"
    ) as (process, lines):
        children = descendants(process)
        ranks = ranks_of(f"{group.replace('_', '-')}-0", tmp_path)
        assert sorted(ranks) == ["0", "1"]
        ranks["1"].kill()
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, "".join(lines) + out
        assert_all_gone(children)
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    prompts = summary["prompts"]
    assert prompts["consumed"] == prompts["issued"] == 40
    assert prompts["outstanding"] == prompts["dropped"] == 0
