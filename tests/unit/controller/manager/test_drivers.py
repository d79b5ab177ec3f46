"""Tests of user requests to active runs."""

import asyncio
import json

import pytest

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import parse_spec
from services.controller.manager.drivers import SPEC_NOT_ACCEPTED
from services.controller.manager.run_collector import RunCollector
from services.controller.rules.run_state import RunEvent, RunState
from services.controller.store.records import RELEASE, NewRun, Submission
from services.controller.store.runs import InvalidTransitionError, RunStore
from tests.helpers.rest import SPEC, open_manager

pytestmark = pytest.mark.postgresql


async def test_an_evaluation_needs_a_run_that_trains_and_prompts_to_evaluate_with(
    manager, database
):
    run, _ = await manager.create(Submission(spec=parse_spec(json.dumps(SPEC))))
    with pytest.raises(InvalidTransitionError):
        await manager.drivers.evaluate(run)
    running, _ = RunStore(database).apply(run.run_id, RunEvent.READY, reason="Test")
    with pytest.raises(FailedPreconditionError, match=r"data\.heldout"):
        await manager.drivers.evaluate(running)


STATES = {
    "QUEUED": (),
    "RUNNING": (RunEvent.ADMIT, RunEvent.READY),
    "STARTING": (RunEvent.ADMIT,),
    "RECOVERING": (RunEvent.ADMIT, RunEvent.LOSE),
    "PAUSING": (RunEvent.ADMIT, RunEvent.READY, RunEvent.PAUSE),
    "CANCELLING": (RunEvent.ADMIT, RunEvent.CANCEL),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_run_that_this_release_rejects_is_paused_and_others_continue(database, state):
    store = RunStore(database)
    broken = {**SPEC, "name": "broken", "key_of_another_release": 1}
    for number, spec in enumerate((broken, SPEC)):
        text = json.dumps(spec)
        new = NewRun(
            run_id=f"run_{number:032x}",
            name=spec["name"],
            spec_json=text,
            spec_digest="",
            release="9.9",
        )
        store.create(new)
    stuck, other = f"run_{0:032x}", f"run_{1:032x}"
    for event in STATES[state]:
        store.apply(stuck, event, reason="Test")
    async with open_manager(database, max_active_runs=2) as manager, asyncio.timeout(20):
        async for _ in manager.feed.watch(stuck, 0):
            run = await manager.get(stuck)
            if run.state in (RunState.PAUSED, RunState.CANCELLED):
                break
        if state == "CANCELLING":
            assert run.state is RunState.CANCELLED
        else:
            assert (run.state, run.state_reason) == (RunState.PAUSED, SPEC_NOT_ACCEPTED)
            assert "9.9" in run.message and "key_of_another_release" in run.message
        assert other in manager.drivers.driven_runs()
        await manager.cancel(stuck)


async def test_a_scrape_describes_runs_next_to_a_rejected_one(database):
    store = RunStore(database)
    broken = {**SPEC, "name": "broken", "key_of_another_release": 1}
    for number, spec in enumerate((broken, SPEC)):
        text = json.dumps(spec)
        store.create(
            NewRun(run_id=f"run_{number}", name=spec["name"], spec_json=text, spec_digest="")
        )
    collector = RunCollector(lambda: store.list_runs(limit=9, has_specs=True), lambda run_id: ())
    samples = [sample for family in collector.collect() for sample in family.samples]
    named = {sample.labels["run"] for sample in samples if sample.name == "slipstream_run_info"}
    states = {sample.labels["run"] for sample in samples if sample.name == "slipstream_run_state"}
    assert (named, states) == ({"run_1"}, {"run_0", "run_1"})


def test_a_specification_carries_the_release_that_wrote_it(database):
    store = RunStore(database)
    store.create(NewRun(run_id="run_1", name="a", spec_json=json.dumps(SPEC), spec_digest=""))
    assert store.get("run_1").release == RELEASE
