"""Training runs of every kind whose processes are killed at random.

Each kind tests other rules: the staleness bound, responses that several rollouts continue, GPU time sharing,
adapters, a trainer of two ranks, groups that dynamic sampling replaces, evaluations, checkpoints that are due
by steps and by time. Batches wait without a limit for groups that would be stale, so no group may
exceed the bound. In runs that mask stale tokens instead, no token over the bound may train.
"""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults.training import Training, processes_of
from tests.helpers.ledger_check import check_run
from tests.helpers.plumbing import write_plumbing

KILLS_PER_RUN = 20

VICTIMS = ("controller", "rollout-0", "rollout-1", "trainer-0", "transferqueue")
GROUPS = "training groups"
"""Kind of run in which ``logp``, ``ref_logp`` and ``critic`` have their own workers."""
MIXED = "mixed, evaluations"
"""Kind of run in which two rollouts share GPUs with the trainer and the third one evaluates each version."""
MORE_VICTIMS: Mapping[str, tuple[str, ...]] = {
    GROUPS: ("logp-0", "ref-logp-0", "critic-0"),
    MIXED: ("rollout-2",),
}
"""Additional workers that may be killed, by kind of run."""

_SEGMENTS = (
    "rollout.partial_rollout=true",
    "rollout.segment_tokens=8",
    "rollout.max_response_tokens=120",
)
_HELDOUT = ("data.heldout={source: jsonl, path: prompts.jsonl, limit: 6}",)
_REFILLS = (
    # Half of the groups have equal rewards.
    "rollout.group_size=2",
    "rollout.rewards=[{name: 'reward.py:odd'}]",
    "algorithm.dynamic_sampling=true",
    "algorithm.max_refill_factor=1000",
)
KINDS: Mapping[str, tuple[str, ...]] = {
    "lag 0": ("algorithm.max_staleness=0",),
    "lag 1": ("algorithm.max_staleness=1",),
    "lag 2": ("algorithm.max_staleness=2", "rollout.max_response_tokens=60"),
    "lag 4": ("algorithm.max_staleness=4", "rollout.max_response_tokens=60"),
    "segments": ("algorithm.max_staleness=2", *_SEGMENTS),
    "segments, masked": ("algorithm.max_staleness=2", "algorithm.on_stale=mask", *_SEGMENTS),
    "refills": (
        "algorithm.max_staleness=1",
        "trainer.checkpoint.every=2",
        "validation.every=2",
        *_REFILLS,
        *_HELDOUT,
    ),
    "refills, lag 4, by time": (
        "algorithm.max_staleness=4",
        "trainer.checkpoint={every: 0, every_s: 4.0}",
        "validation={every: 3, replicas: 1}",
        *_REFILLS,
        *_HELDOUT,
    ),
    "evaluations with a barrier": (
        "algorithm.max_staleness=2",
        "algorithm.min_group_size=3",
        "trainer.checkpoint={every: 0, every_s: 2.0}",
        "validation={every: 2, mode: barrier}",
        *_HELDOUT,
    ),
    "segments, evaluations": (
        "algorithm.max_staleness=2",
        "validation={every: 3, replicas: 1}",
        *_SEGMENTS,
        *_HELDOUT,
    ),
    "colocated": ("topology.placement=colocated", "validation={every: 2}", *_HELDOUT),
    "mixed": (
        "topology.placement=mixed",
        "algorithm.max_staleness=2",
        "rollout.max_response_tokens=60",
    ),
    MIXED: (
        "topology.placement=mixed",
        "trainer.world_size=2",
        "rollout.replicas=3",
        "algorithm.max_staleness=2",
        "rollout.max_response_tokens=60",
        "trainer.checkpoint={every: 0, every_s: 3.0}",
        "validation={every: 1, replicas: 1}",
        *_HELDOUT,
    ),
    "adapters": ("trainer.lora={rank: 4}", "rollout.max_response_tokens=30"),
    "two trainer ranks": ("trainer.world_size=2", "rollout.max_response_tokens=30"),
    GROUPS: (
        "topology.task_groups=[train, ref_logp, logp, critic, generate]",
        "topology.ratios=[0.16, 0.16, 0.16, 0.16, 0.36]",
        "topology.gpus=6",
        "trainer.updates_per_step=2",
        "algorithm.advantage=gae",
        "algorithm.correction=decoupled",
        "algorithm.kl.coefficient=0.01",
        "rollout.max_response_tokens=30",
    ),
}
"""Settings of each kind of run, in addition to those of all kinds."""

_COMMON = (
    "rollout.replicas=2",
    # A checkpoint contains unfinished responses, which a restarted transferqueue restores.
    "trainer.checkpoint.every=3",
    "limits.max_restarts=200",
    "algorithm.stale_wait_timeout_s=3600",
    "samples.groups_per_step=1000",
    "samples.heldout_prompts=0",
)
_MOST_STEPS_BETWEEN = 5
_MOST_SECONDS_BETWEEN = 25.0


def kill_at_random(
    training: Training, chooser: random.Random, kills: int, victims: Sequence[str] = VICTIMS
) -> list[str]:
    """Kills services while the command runs, from its first step on; returns their names.

    Some kills hit the recovery from the previous kill, others a run that has trained further steps.
    """
    killed: list[str] = []
    process = training.process
    root = psutil.Process(process.pid)
    while process.poll() is None and training.step() < 1:
        time.sleep(0.2)
    while process.poll() is None and len(killed) < kills:
        step = training.step() + chooser.randint(0, _MOST_STEPS_BETWEEN)
        end = time.monotonic() + chooser.uniform(1.0, _MOST_SECONDS_BETWEEN)
        while process.poll() is None and training.step() < step and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(chooser.uniform(0.0, 1.0))
        name = chooser.choice(victims)
        victim = processes_of(root).get(name) if root.is_running() else None
        if victim is not None and victim.is_running():
            victim.kill()
            killed.append(name)
    return killed


def run_and_kill(
    folder: Path,
    seed: int,
    kind: str = "lag 1",
    *,
    kills: int = KILLS_PER_RUN,
    steps: int = 60,
    victims: Sequence[str] = (),
    timeout_s: float = 1200.0,
) -> dict[str, Any]:
    """Trains in a folder while the run's processes are killed; returns counts of its events.

    Args:
        folder: Folder for the run's state.
        seed: Seed of the order and the moments of the kills.
        kind: Kind of the run, a key of ``KINDS``.
        kills: Max number of kills.
        steps: Number of steps that the run trains.
        victims: Processes that may be killed; by default all of the kind.
        timeout_s: Seconds that the run may take after the last kill.

    Raises:
        AssertionError: If the run failed, its ledger does not close, or it trained beyond its bound.
        subprocess.TimeoutExpired: If the run does not end in time.
    """
    state = folder / "runs"
    victims = victims or (*VICTIMS, *MORE_VICTIMS.get(kind, ()))
    settings = (f"trainer.steps={steps}", *_COMMON, *KINDS[kind])
    training = Training(write_plumbing(folder), state, *settings)
    training.start()
    try:
        killed = kill_at_random(training, random.Random(seed), kills, victims)
        code = training.process.wait(timeout_s)
    finally:
        training.close()
    assert code == 0, f"{killed}\n{training.output[-4000:]}"
    facts = check_run(state)
    assert facts["samples_checked"] > 0
    return {"seed": seed, "kind": kind, "killed": dict(Counter(killed)), **facts}


def tried(folder: Path, seed: int, kind: str) -> dict[str, Any]:
    """Runs one training with kills; returns its result, also if it is a failure."""
    try:
        return run_and_kill(folder, seed, kind)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        why = f"{type(error).__name__}: {error}"
        # The cause is at the end of the output.
        return {
            "seed": seed,
            "kind": kind,
            "killed": {},
            "failure": f"{why[:300]} ... {why[-2000:]}",
        }
