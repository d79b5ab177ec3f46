"""Training runs of every kind whose processes are killed at random.

Each kind tests other rules: the staleness bound, responses that several rollouts continue, GPU time
sharing, adapters, a trainer of two ranks, groups that dynamic sampling replaces, evaluations,
checkpoints that are due by steps and by time, weights in a store, attached servers. Batches wait without
a limit for groups that would be stale, so no group may exceed the bound. In runs that mask stale tokens
instead, no token over the bound may train.
"""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.faults.fleets import Fault, Fleet
from tests.faults.training import Training, processes_of
from tests.helpers.ledger_check import check_run
from tests.helpers.logprob_check import check_logprobs
from tests.helpers.plumbing import write_plumbing

KILLS_PER_RUN = 20
STEPS_PER_RUN = 60

VICTIMS = ("controller", "rollout-0", "rollout-1", "trainer-0", "transferqueue")
GROUPS = "training groups"
"""Kind of run in which ``logp``, ``ref_logp`` and ``critic`` have their own workers."""
MIXED = "mixed, evaluations"
"""Kind of run in which two rollouts share GPUs with the trainer and the third one evaluates each version."""
SERVERS = "attached servers"
"""Kind of run whose rollout attaches to servers, which die, freeze and lose their links as well."""
DIRECT = "attached servers, weights from the trainer"
"""The same with weights that the trainer sends to the servers' workers, past the rollout."""
STORED = "stored weights"
"""Kind of run whose rollouts load the changes of each version from a folder, at their own pace."""
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
_SERVERS = (
    "algorithm.max_staleness=2",
    "rollout.max_response_tokens=60",
    # Versions differ so much that tokens under another one are found by their logprobs.
    "trainer.optimizer.learning_rate=1e-3",
    "validation={every: 3}",
    *_HELDOUT,
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
    STORED: (
        "algorithm.max_staleness=4",
        "rollout.max_response_tokens=60",
        "weight_sync={backend: storage, mode: delta}",
        "validation={every: 3}",
        *_HELDOUT,
    ),
    SERVERS: (*_SERVERS, "weight_sync.mode=cpu_async"),
    DIRECT: (*_SERVERS, "weight_sync.mode=servers"),
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


class EndedError(AssertionError):
    """The command ended without success."""


def kill_at_random(
    training: Training,
    chooser: random.Random,
    kills: int,
    victims: Sequence[str] = VICTIMS,
    faults: Mapping[str, Fault] = MappingProxyType({}),
) -> list[str]:
    """Kills services while the command runs, from its first step on; returns their names.

    Some kills hit the recovery from the previous kill, others a run that has trained further steps.

    Args:
        kills: Number of kills and other faults.
        faults: Other faults by name, which are as likely as the kill of one service.
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
        name = chooser.choice((*victims, *faults))
        if name in faults:
            faults[name](chooser)
            killed.append(name)
            continue
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
    steps: int = STEPS_PER_RUN,
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
        EndedError: If the run failed.
        AssertionError: If its ledger does not close, or it trained beyond its bound.
        subprocess.TimeoutExpired: If the run does not end in time.
    """
    state, spec = folder / "runs", write_plumbing(folder)
    victims = victims or (*VICTIMS, *MORE_VICTIMS.get(kind, ()))
    settings = (f"trainer.steps={steps}", *_COMMON, *KINDS[kind])
    with ExitStack() as stack:
        fleet = Fleet(folder, spec) if kind in (SERVERS, DIRECT) else None
        if fleet is not None:
            stack.enter_context(fleet.serving())
            settings += fleet.settings()
            victims = [name for name in victims if name != "rollout-1"]
        if kind == STORED:
            settings += (f"weight_sync.storage.directory={folder / 'weights'}",)
        training = Training(spec, state, *settings)
        training.start()
        stack.callback(training.close)
        faults = {} if fleet is None else fleet.faults(training)
        names = kill_at_random(training, random.Random(seed), kills, victims, faults)
        code = training.process.wait(timeout_s)
    if code:
        raise EndedError(f"{names}\n{training.output[-4000:]}")
    facts = check_run(state)
    assert facts["samples_checked"] > 0
    kl = {} if fleet is None else check_logprobs(state)
    killed = [name.removeprefix("kill ") for name in names]
    fault_counts = (
        {"faults": dict(Counter(name for name in killed if " " in name))} if faults else {}
    )
    counts = dict(Counter(name for name in killed if " " not in name))
    return {"seed": seed, "kind": kind, "killed": counts, **fault_counts, **facts, **kl}


def tried(folder: Path, seed: int, kind: str, **size: int) -> dict[str, Any]:
    """Runs one training with kills; returns its result, also if it is a failure.

    A failure states whether the data are wrong, which no load of the machine excuses, or whether the run
    ended or took too long; then ``cpu_pressure``, the share of time in which a task waited for a processor,
    shows whether its processes may have missed deadlines because the machine was busy.
    """
    started_at, waited_s = time.monotonic(), _cpu_wait_s()
    try:
        return run_and_kill(folder, seed, kind, **size)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        why = f"{type(error).__name__}: {error}"
        is_ended = isinstance(error, EndedError | subprocess.TimeoutExpired)
        share = (_cpu_wait_s() - waited_s) / max(time.monotonic() - started_at, 1e-3)
        # The cause is at the end of the output.
        return {
            "seed": seed,
            "kind": kind,
            "killed": {},
            "failure": f"{why[:300]} ... {why[-2000:]}",
            "wrong": "end" if is_ended else "data",
            "cpu_pressure": round(share, 2),
        }


def _cpu_wait_s() -> float:
    """Returns the seconds since the start of the machine in which a task waited for a processor.

    0 if the kernel does not count them.
    """
    try:
        some, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
    except OSError:
        return 0.0
    return float(some.rpartition("=")[2]) / 1e6
