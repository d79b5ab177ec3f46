"""Tests of which checkpoints of a run are kept."""

from functools import partial
from types import SimpleNamespace

import pytest

from services.common.errors import DeadlineExceededError, FailedPreconditionError
from services.common.runspec.loader import canonical_json, parse_spec
from services.controller.launch.launcher import ExternalLauncher
from services.controller.manager.archive import NoCheckpointError, check_usable
from services.controller.rules.ledger import Ledger
from services.controller.rules.run_state import RunEvent
from services.controller.run.state.journal import Journal
from services.controller.run.train.checkpoints import Checkpoints, ready_checkpoints
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from tests.helpers.rest import SPEC
from tests.unit.controller.workers import MemoryQueue

pytestmark = pytest.mark.postgresql


class Trainer:
    """Fake trainer that keeps the newest checkpoint and those of ``keep_steps``."""

    exists = False
    """As a critic: the run has none."""

    def __init__(self):
        self.steps = []
        self.on_save = lambda: None

    async def save_checkpoint(self, step, *, keep_steps, timeout_s):
        self.on_save()
        self.steps = [*(old_step for old_step in self.steps if old_step in keep_steps), step]
        return f"/checkpoints/step-{step:08d}", 1

    async def save(self, step, *, keep_steps, timeout_s):
        """Does nothing, because the run has no critic."""


def new_run(run_id, **checkpoint):
    trainer = {**SPEC["trainer"], "checkpoint": checkpoint}
    spec = parse_spec({**SPEC, "name": run_id.replace("_", "-"), "trainer": trainer})
    return NewRun(run_id=run_id, name=run_id, spec_json=canonical_json(spec), spec_digest="d")


class Critic(Trainer):
    """Fake critic with its own GPUs."""

    exists = True

    async def save(self, step, *, keep_steps, timeout_s):
        await self.save_checkpoint(step, keep_steps=keep_steps, timeout_s=timeout_s)


def parent(database, critic=None):
    """Returns trainer and journal of a run that keeps one checkpoint, and a function that saves a step."""
    store, trainer = RunStore(database), Trainer()
    store.create(new_run("run_1"))
    store.apply("run_1", RunEvent.ADMIT, reason="Admitted")
    journal = Journal("run_1", database=database, store=store, on_event=lambda event: None)
    checkpoints = Checkpoints(
        "run_1",
        keep=1,
        journal=journal,
        queue=MemoryQueue(),
        clock=SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0),
        unsaved_s=0.0,
        saved_step=0,
        why_volatile=partial(ExternalLauncher().why_volatile, "run_1"),
    )

    async def save(step):
        is_saved = await checkpoints.save(
            trainer,
            critic or trainer,
            Ledger(max_attempts=1),
            step=step,
            version=step,
            keep_steps=(),
            skipped_since=None,
            also=lambda connection: None,
        )
        steps = [checkpoint.step for checkpoint in await journal.read(ready_checkpoints)]
        assert critic or sorted(steps) == trainer.steps
        assert is_saved == (step in steps)
        return trainer.steps

    return trainer, journal, save


def fork(database, run_id, checkpoint):
    new = new_run(run_id, start_from=checkpoint.path)
    RunStore(database).create(new, also=lambda connection: check_usable(connection, checkpoint))


async def test_a_checkpoint_stays_until_the_runs_that_start_from_it_have_ended(database):
    store, (_, _, save) = RunStore(database), parent(database)
    assert await save(1) == [1]
    # A fork is queued while its parent continues to train.
    store.create(new_run("run_2", start_from="/checkpoints/step-00000001"))
    assert await save(2) == [1, 2]
    assert await save(3) == [1, 3]
    store.apply("run_2", RunEvent.CANCEL, reason="CancelledByUser")
    assert await save(4) == [4]


async def test_a_fork_while_its_parent_saves_gets_a_checkpoint_that_stays_or_none(
    database, monkeypatch
):
    trainer, journal, save = parent(database)
    await save(1)
    [first] = await journal.read(ready_checkpoints)
    record_event = Journal.record_event

    async def after_fork(self, note, *arguments, **options):
        if note.type == "CheckpointStarted":
            fork(database, "run_2", first)
        await record_event(self, note, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "record_event", after_fork)
        assert await save(2) == [1, 2]
    second, _ = await journal.read(ready_checkpoints)
    refused = []

    def on_save():
        fork(database, "run_3", first)  # run_2 prevents the deletion of this checkpoint
        with pytest.raises(NoCheckpointError) as error:
            fork(database, "run_4", second)
        refused.append(error.value.reason)

    trainer.on_save = on_save
    assert await save(3) == [1, 3]
    assert refused == ["NO_USABLE_CHECKPOINT"]
    third, _ = await journal.read(ready_checkpoints)
    fork(database, "run_4", third)


async def test_a_checkpoint_stays_if_it_cannot_be_saved_again(database, monkeypatch):
    _, _, save = parent(database)
    await save(1)

    async def save_snapshot(self, run_id, name):
        raise DeadlineExceededError("the transferqueue does not answer")

    monkeypatch.setattr(MemoryQueue, "save_snapshot", save_snapshot)
    assert await save(1) == [1]
    assert await save(2) == [1]


@pytest.mark.parametrize("is_critic", [False, True])
async def test_trainer_and_critic_keep_the_checkpoint_of_both_if_one_fails(database, is_critic):
    critic = Critic()
    trainer, journal, save = parent(database, critic)
    await save(1)

    def fail():
        raise FailedPreconditionError("no space left on the device")

    failing = critic if is_critic else trainer
    failing.on_save = fail
    for step in (2, 3):
        await save(step)
        assert [row.step for row in await journal.read(ready_checkpoints)] == [1]
        assert {1} <= {*trainer.steps} & {*critic.steps}
    failing.on_save = lambda: None
    for step in (4, 5):
        await save(step)
        assert [row.step for row in await journal.read(ready_checkpoints)] == [step]
    assert trainer.steps == critic.steps == [4, 5]
