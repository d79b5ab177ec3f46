"""Runs whose workers are steps of a Slurm allocation."""

from pathlib import Path

import pytest

from tests.helpers.ledger_check import check_run
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import QUICK, submit

_TIME = ("--time=30", "--cpus-per-task=1")
_TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", *_TIME)


@pytest.mark.timeout(1000)
def test_a_job_that_gets_the_signal_of_its_end_pauses_and_its_requeued_job_loses_no_step(
    cluster: Cluster,
):
    job = submit(
        cluster, "preemptible.sbatch", options=_TWO_BY_TWO, keys={**QUICK, "trainer.steps": 4}
    )
    job.until(lambda: job.steps() >= 1, timeout_s=480)
    # The trainer's ranks are on the first node, whose GPUs they use, and the rollouts on the second.
    placed = {name: job.nodes_of(name) for name in ("trainer-0", "rollout-0", "rollout-1")}
    assert placed == {"trainer-0": ["n1"], "rollout-0": ["n2"], "rollout-1": ["n2"]}
    # As Slurm does before the time limit with --signal=B:USR1@300.
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.wait(timeout_s=480)
    assert "paused; the same command resumes it" in job.output
    counts = check_run(job.state_directory)
    assert (counts["rewinds"], counts["losses"]) == (0, 0)


@pytest.mark.nightly
@pytest.mark.timeout(1400)
def test_a_pre_empted_job_gives_its_nodes_away_and_loses_no_step(cluster: Cluster, tmp_path: Path):
    job = submit(
        cluster, "preemptible.sbatch", options=_TWO_BY_TWO, keys={**QUICK, "trainer.steps": 6}
    )
    job.until(lambda: job.steps() >= 1, timeout_s=480)
    urgent = tmp_path / "urgent.sbatch"
    urgent.write_text("#!/bin/sh\nsleep 5\n")
    options = ("--partition=urgent", "--nodes=3", "--exclusive", f"--output={cluster.root}/urgent")
    urgent_job = cluster.submit(urgent, options=options)
    job.until(lambda: cluster.state(urgent_job) != "PENDING", timeout_s=300)
    assert "paused; the same command resumes it" in job.output
    job.wait(timeout_s=480)
    assert cluster.state(urgent_job) == "COMPLETED"
    counts = check_run(job.state_directory)
    assert (counts["rewinds"], counts["losses"]) == (0, 0)


@pytest.mark.nightly
@pytest.mark.timeout(1900)
def test_the_example_learns_over_two_nodes_of_two_tasks(cluster: Cluster):
    job = submit(
        cluster, "several-nodes.sbatch", options=_TWO_BY_TWO, keys={"trainer.world_size": 2}
    )
    job.wait(timeout_s=1800)
    assert job.heldout() > 0.5, job.output
    check_run(job.state_directory)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_ranks_on_two_nodes_train_together_with_a_shard_on_each_further_node(cluster: Cluster):
    options = ("--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=1", *_TIME)
    keys = {**QUICK, "trainer.steps": 3, "rollout.replicas": 1}
    job = submit(
        cluster,
        "several-nodes.sbatch",
        options=options,
        keys=keys,
        variables={"SLIPSTREAM_SLURM_SHARDS": "true"},
    )
    job.until(lambda: job.steps() >= 1, timeout_s=480)
    assert job.nodes_of("trainer-0") == ["n1", "n2"]
    assert job.nodes_of("rollout-0") == ["n3"]
    for name in ("n2", "n3"):
        log = job.state_directory / "logs" / f"shard-{name}.log"
        assert f"shard_id=shard-{name}" in log.read_text()
    job.wait(timeout_s=480)
    assert not (job.state_directory / "shards").exists(), "it has the key of the services"
    check_run(job.state_directory)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_a_requeued_job_resumes_from_its_checkpoint_and_trains_each_prompt_once(cluster: Cluster):
    keys = {**QUICK, "trainer.steps": 6, "trainer.checkpoint.every": 1}
    job = submit(cluster, "preemptible.sbatch", options=_TWO_BY_TWO, keys=keys)
    job.until(lambda: bool(job.events("CheckpointSaved")), timeout_s=480)
    # Slurm ends all processes at once.
    cluster.command("scontrol", "requeue", job.id)
    job.wait(timeout_s=480)
    assert "interrupted" in job.output or "paused" in job.output
    check_run(job.state_directory)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_a_lost_node_is_named_and_the_run_goes_on_without_its_rollout(cluster: Cluster):
    options = ("--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=1", *_TIME)
    keys = {**QUICK, "trainer.world_size": 1, "trainer.steps": 40}
    job = submit(cluster, "several-nodes.sbatch", options=options, keys=keys)
    job.until(lambda: job.steps() >= 2, timeout_s=480)
    cluster.kill_node("n3")
    job.until(lambda: bool(job.events("WorkerLost")), timeout_s=120)
    steps = job.steps()
    assert "n3" in job.events("WorkerLost")[0], job.events("WorkerLost")
    job.until(lambda: job.steps() >= steps + 3, timeout_s=120)
    job.wait(timeout_s=480)
    check_run(job.state_directory)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_rollouts_are_on_the_second_component_of_a_heterogeneous_job(cluster: Cluster):
    job = submit(
        cluster,
        "heterogeneous.sbatch",
        options=_TIME,
        keys={**QUICK, "trainer.steps": 3},
        components=(
            ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=2"),
            ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"),
        ),
    )
    job.until(lambda: job.steps() >= 1, timeout_s=480)
    placed = {name: job.nodes_of(name) for name in ("trainer-0", "rollout-0", "rollout-1")}
    assert placed == {"trainer-0": ["n1"], "rollout-0": ["n2"], "rollout-1": ["n3"]}
    job.wait(timeout_s=480)
    check_run(job.state_directory)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_trainer_and_rollout_take_turns_on_the_gpu_of_one_node(cluster: Cluster):
    options = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", *_TIME)
    turns = {"trainer.world_size": 1, "rollout.replicas": 1, "topology.placement": "colocated"}
    keys = {**QUICK, **turns, "trainer.steps": 3}
    job = submit(cluster, "one-node.sbatch", options=options, keys=keys)
    job.until(lambda: job.steps() >= 1, timeout_s=480)
    assert job.gpus_of("trainer-0") == job.gpus_of("rollout-0") == {"n1": ["0"]}
    job.wait(timeout_s=480)
    check_run(job.state_directory)
