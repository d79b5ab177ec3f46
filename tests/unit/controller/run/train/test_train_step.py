"""Tests that a step is committed only if its trained tokens are within the staleness bound."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from services.controller.rules.ledger import GroupState, Ledger
from services.controller.rules.prompts import Mixture
from services.controller.run.observe.progress import Progress
from services.controller.run.observe.waits import Waits
from services.controller.run.state.requests import CurrentSpec
from services.controller.run.train.train_step import StalenessError, TrainSteps
from services.wire.batch import KVBatchMeta
from services.wire.workers import TrainedStep
from tests.helpers.specs import spec_with

BOUND = 2


class Recorder:
    """Fake journal that records calls."""

    def __init__(self):
        self.committed, self.events, self.notes = [], [], []

    async def commit_step(self, step, ledger, *, note, metrics):
        self.committed.append((step, note.summary["staleness"]))
        self.notes.append(note)

    async def record_event(self, note, ledger=None):
        self.events.append(note)


class Samples:
    """Fake sample index without samples; the fake trainer needs none."""

    def __contains__(self, group):
        return False

    def meta(self, groups):
        return KVBatchMeta(partition_id="run_1/train", keys=())


def steps_of(ledger, *, staleness_max=0.0, skipped=False, **reported):
    """Returns the train steps of a run whose trainer reports ``staleness_max`` and further metrics."""

    async def answer(*args, **kwargs):
        numbers = {"loss": 0.0, "staleness_max": staleness_max, "staleness_mean": 1.0, **reported}
        return TrainedStep(step=1, metrics=numbers, skipped=skipped)

    async def pass_on(samples, **kwargs):
        return samples

    async def nothing(*args, **kwargs):
        return {}

    connections = SimpleNamespace(
        trained=0,
        trainer=SimpleNamespace(train_step=answer),
        scoring=SimpleNamespace(add_fields=pass_on),
        critic=SimpleNamespace(train=nothing),
        weights=SimpleNamespace(trainer_lock=asyncio.Lock()),
        rollout_pool=SimpleNamespace(
            idle_seconds=dict, tokens_total=lambda: 0.0, decode_times=dict, acceptance_length=dict
        ),
    )
    return TrainSteps(
        run_id="run_1",
        spec=CurrentSpec(spec_with(algorithm={"max_staleness": BOUND})),
        journal=Recorder(),
        waits=Waits(),
        connections=connections,
        ledger=ledger,
        mixture=Mixture({"train": 4}),
        scheduler=SimpleNamespace(sample_index=Samples(), release=nothing),
        progress=Progress(BOUND),
        gpu_time_sharing=SimpleNamespace(begin_training=nothing, take_seconds=dict),
        observers=SimpleNamespace(record_step=lambda data: None),
        version_offset=0,
    )


def batch_of(ledger):
    group = ledger.issue(0, position=1)
    ledger.lease(group, "rollout-0", version=0, now=0.0)
    ledger.complete(group, oldest_version=0)
    ledger.train([group])
    return [group]


async def test_a_step_within_the_bound_is_committed():
    ledger = Ledger(max_attempts=3)
    steps = steps_of(ledger, staleness_max=2.0)
    await steps.train(1, batch_of(ledger), begin=0.0)
    assert steps.journal.committed == [(1, {"max": 2, "mean": 1.0, "bound": BOUND})]


async def test_a_step_that_trained_over_the_bound_fails_the_run_and_is_not_committed():
    ledger = Ledger(max_attempts=3)
    steps = steps_of(ledger, staleness_max=3.0)
    with pytest.raises(StalenessError, match="max_staleness"):
        await steps.train(1, batch_of(ledger), begin=0.0)
    assert steps.journal.committed == []
    assert ledger.count(GroupState.TRAINING) == 1


async def test_a_publication_that_waits_for_the_trainer_finds_the_step_committed():
    ledger = Ledger(max_attempts=3)
    steps = steps_of(ledger)
    lock = steps.connections.weights.trainer_lock

    async def publication():
        async with lock:
            return steps.progress.num_steps, len(steps.journal.committed)

    async with lock:
        training = asyncio.create_task(steps.train(1, batch_of(ledger), begin=0.0))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(publication())
        await asyncio.sleep(0)
    await training
    assert await waiting == (1, 1)


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ({"overflow_updates": 1.0, "loss_scale": 32768.0, "grad_norm": math.nan}, "32768"),
        ({"nonfinite_updates": 1.0, "loss": math.nan}, "loss not finite"),
    ],
)
async def test_a_skipped_step_is_committed_and_its_event_says_why(reported, reason):
    ledger = Ledger(max_attempts=3)
    steps = steps_of(ledger, skipped=True, **reported)
    await steps.train(1, batch_of(ledger), begin=0.0)
    assert [step for step, _ in steps.journal.committed] == [1]
    (note,) = steps.journal.notes
    assert note.data["is_skipped"] == 1
    (event,) = steps.journal.events
    assert (event.type, event.step) == ("StepSkipped", 1)
    assert reason in event.message
    assert ("float16" in event.message) == ("overflow_updates" in reported)
