"""Tests that a running run reports its bottleneck once, and again when the bottleneck changes."""

import asyncio

import pytest

from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.controller.rules.ledger import Ledger
from services.controller.run.observe.observers import ObserverArgs
from services.controller.run.observe.progress import Progress
from services.controller.run.state.requests import CurrentSpec
from services.extras.planner.advisor import Advisor
from tests.helpers.specs import spec_with

SPEC = spec_with(
    rollout={"replicas": 1},
    algorithm={"max_staleness": 1},
    trainer={"steps": 100, "prompts_per_step": 8},
)


RESIZED = object()
"""Marker in place of a step: the run has another number of rollouts from here on."""


class Journal:
    def __init__(self):
        self.notes = []

    async def record_event(self, note, ledger):
        self.notes.append(note)


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def step(**changes):
    """Returns a step of a run with generation as bottleneck; its duration is the predicted one."""
    return {
        "seconds": 2.2,
        "trainer_wait_s": 1.2,
        "seconds_total": 0.8,
        "response_tokens": 6_000.0,
        "decode_fixed_s": 0.008,
        "decode_sample_s": 1e-5,
        "decode_max_samples": 64.0,
        "histograms": {"response_tokens": {"64": 30, "128": 20, "256": 10, "384": 4}},
        **changes,
    }


def advised(*batches, pause_s=4000.0, spec=SPEC, gpus=3):
    """Runs an advisor on batches of steps, with a pause between batches."""
    journal, progress, clock = Journal(), Progress(1), Clock()

    async def run():
        advisor = Advisor(
            ObserverArgs(
                spec=CurrentSpec(spec),
                journal=journal,
                progress=progress,
                ledger=Ledger(3),
                clock=clock,
                gpus=lambda: gpus,
            )
        )
        for batch in batches:
            for record in batch:
                if record is RESIZED:
                    advisor.reset()
                else:
                    advisor.record_step(record)
            await advisor.update()
            clock.now += pause_s

    asyncio.run(run())
    return journal.notes, progress


def test_a_young_run_gets_no_advice():
    notes, progress = advised([step()] * 9)
    assert notes == []
    assert progress.summary(Ledger(3))["advice"] == {}


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_run_on_demonstrations_gets_no_advice(loss):
    document = spec_with().model_dump(mode="json", include={"name", "model", "data"})
    trainer = {"steps": 20, "prompts_per_step": 4}
    rollout = {"max_response_tokens": 8}
    spec = parse_spec(
        {**document, "trainer": trainer, "rollout": rollout, "algorithm": {"loss": loss}}
    )
    notes, _ = advised([step()] * 12, spec=spec)
    assert notes == []


def test_what_is_found_is_an_event_and_part_of_the_summary():
    notes, progress = advised([step()] * 12)
    (note,) = notes
    assert note.type == "Advice"
    assert note.data["bottleneck"] == "generation"
    assert round(note.data["waited"], 2) == 0.55
    advice = progress.summary(Ledger(3))["advice"]
    assert advice["message"] == note.message
    assert advice["remedy"] in note.message


def test_the_same_advice_is_not_repeated():
    notes, _ = advised([step()] * 12, [step()] * 12, [step()] * 12)
    assert len(notes) == 1


def test_changed_advice_is_reported():
    trained = {"seconds": 2.2, "seconds_total": 2.2, "trainer_wait_s": 0.0, "rollout_idle_s": 1.0}
    notes, _ = advised([step()] * 12, [step(**trained)] * 40)
    assert [note.data["bottleneck"] for note in notes] == ["generation", "training"]


def test_changes_are_not_looked_for_all_the_time():
    trained = {"seconds": 2.2, "seconds_total": 2.2, "trainer_wait_s": 0.0, "rollout_idle_s": 1.0}
    notes, _ = advised([step()] * 12, [step(**trained)] * 40, pause_s=10.0)
    assert len(notes) == 1


def test_steps_that_lack_a_number_name_the_side_that_waits_and_a_remedy_follows():
    notes, _ = advised([step(decode_fixed_s=None)] * 12, [step()] * 12)
    assert [note.data["bottleneck"] for note in notes] == ["generation"] * 2
    assert [bool(note.data["changes"]) for note in notes] == [False, True]
    assert notes[0].data["predicted_step_s"] is None


def test_steps_with_other_rollouts_than_now_do_not_count():
    slow = [step(seconds=9.0, trainer_wait_s=8.0)] * 9
    notes, _ = advised([*slow, RESIZED, *[step()] * 9])
    assert notes == []
    notes, progress = advised([*slow, *slow], [RESIZED])
    assert len(notes) == 1
    assert progress.summary(Ledger(3))["advice"] == {}
    notes, _ = advised([*slow, RESIZED, *[step()] * 12])
    assert round(notes[0].data["waited"], 2) == 0.55


def test_advice_survives_a_restart():
    _, progress = advised([step()] * 12)
    summary = progress.summary(Ledger(3))
    again = Progress(1)
    again.restore(summary, steps=12, syncs_ms=())
    assert again.summary(Ledger(3))["advice"] == summary["advice"]


def test_advice_compares_the_placement_with_another_one():
    (note,), _ = advised([step()] * 12)
    assert note.data["placement"] == "disaggregated"
    assert note.data["placements"].keys() == {"colocated", "mixed"}


def test_of_a_run_in_turns_no_side_is_short():
    document = SPEC.model_dump(mode="json")
    document["topology"]["placement"] = "colocated"
    turns = {"gpu_switch_s": 0.2, "trainer_sleep_s": 0.05, "rollouts_wake_s": 0.05}
    steps = [step(**turns, seconds=2.4, trainer_wait_s=1.3)] * 12
    (note,), _ = advised(steps, spec=RunSpec.model_validate(document))
    assert round(note.data["waited"], 2) == 0.54
    assert note.data["placement"] == "colocated"
    assert not {change["key"] for change in note.data["changes"]} & {"rollout.replicas"}


def test_a_host_without_gpus_is_promised_nothing_of_them():
    (note,), _ = advised([step()] * 12, gpus=0)
    assert note.data["placements"] == {}
    keys = {change["key"] for change in note.data["changes"]}
    assert not keys & {"rollout.replicas", "trainer.world_size"}


TRAINED = {"seconds": 4.6, "seconds_total": 3.6, "trainer_wait_s": 0.0, "rollout_idle_s": 1.8}


def changes_of(**settings):
    """Returns the advised changes for a run with training as bottleneck, by key."""
    (note,), _ = advised([step(**TRAINED)] * 40, **settings)
    return {change["key"]: change["after"] for change in note.data["changes"]}


def test_gpus_of_other_task_groups_are_not_offered():
    assert changes_of(gpus=4) == {"trainer.world_size": 2}
    topology = {
        "task_groups": [["train"], ["logp"], ["ref_logp"], ["generate"]],
        "ratios": [0.25] * 4,
        "gpus": 4,
    }
    spec = spec_with(
        rollout={"replicas": 1},
        algorithm={"max_staleness": 1, "correction": "decoupled", "kl": {"coefficient": 0.01}},
        trainer={"steps": 100, "prompts_per_step": 8, "updates_per_step": 2},
        topology=topology,
    )
    assert changes_of(gpus=4, spec=spec) == {}
    assert changes_of(gpus=5, spec=spec) == {"trainer.world_size": 2}


def test_no_change_is_advised_that_the_rules_reject():
    spec = spec_with(
        rollout={"replicas": 1},
        algorithm={"max_staleness": 1},
        trainer={"steps": 100, "prompts_per_step": 8, "engine": "reference"},
    )
    assert changes_of(gpus=4, spec=spec) == {}
