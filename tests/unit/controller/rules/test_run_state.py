"""Tests that the table and the database define or refuse every pair of state and event."""

import itertools
import uuid

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.controller.rules.run_state import (
    TERMINAL,
    TRANSITIONS,
    RunEvent,
    RunState,
    next_state,
)
from services.controller.store.database import Database
from services.controller.store.records import NewRun
from services.controller.store.runs import InvalidTransitionError, RunStore
from services.controller.store.tables import RUNS

pytestmark = pytest.mark.postgresql


@pytest.mark.parametrize("state", RunState)
def test_terminal_states_take_no_event_and_others_some(state):
    events = [event for event in RunEvent if next_state(state, event) is not None]
    assert bool(events) == (state not in TERMINAL)


def test_every_state_is_reached_from_queued_and_leads_to_an_end():
    reached, frontier = {RunState.QUEUED}, [RunState.QUEUED]
    while frontier:
        state = frontier.pop()
        for (before, _), after in TRANSITIONS.items():
            if before is state and after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(RunState)
    ends = TERMINAL | {RunState.CANCELLING}
    for state in set(RunState) - TERMINAL:
        leads_to = {after for (before, _), after in TRANSITIONS.items() if before is state}
        assert leads_to & ends, state


def test_every_pair_is_taken_or_refused_by_the_database(database):
    store = RunStore(database)
    store.create(NewRun(run_id="run_1", name="one", spec_json="{}", spec_digest="d"))
    for state, event in itertools.product(RunState, RunEvent):
        with database.write() as connection:
            connection.execute(RUNS.update().values(state=state.value))
        expected = next_state(state, event)
        if expected is None:
            with pytest.raises(InvalidTransitionError):
                store.apply("run_1", event, reason="Test")
        else:
            assert store.apply("run_1", event, reason="Test")[0].state is expected
        assert store.get("run_1").state is (expected or state), (state, event)


def moves_from(state: RunState) -> dict[RunEvent, RunState]:
    """Returns the events of a state that do not lead to a terminal state, with the states after them."""
    return {
        event: after
        for (before, event), after in TRANSITIONS.items()
        if before is state and after not in TERMINAL
    }


class Runs(RuleBasedStateMachine):
    """State machine that compares the database with the transition table."""

    url = ""

    @initialize()
    def submit(self):
        self.database = Database(self.url)
        self.store = RunStore(self.database)
        self.run_id = f"run_{uuid.uuid4().hex}"
        self.store.create(
            NewRun(run_id=self.run_id, name=self.run_id[-32:], spec_json="{}", spec_digest="d")
        )
        self.path = [RunState.QUEUED]

    @rule(event=st.sampled_from(list(RunEvent)))
    def apply(self, event):
        expected = next_state(self.path[-1], event)
        if expected is None:
            with pytest.raises(InvalidTransitionError):
                self.store.apply(self.run_id, event, reason="Test")
            return
        self.take(event, expected)

    @rule(data=st.data())
    def go_on(self, data):
        if possible := moves_from(self.path[-1]):
            event = data.draw(st.sampled_from(list(possible)))
            self.take(event, possible[event])

    def take(self, event, expected):
        run, _ = self.store.apply(self.run_id, event, reason="Test")
        assert run.state is expected
        self.path.append(expected)

    @rule()
    def restart_the_controller(self):
        self.database.close()
        self.database = Database(self.url)
        self.store = RunStore(self.database)

    @invariant()
    def events_tell_the_path_without_gap(self):
        if not hasattr(self, "path"):
            return
        events = self.store.events(self.run_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        announced = [
            RunState.QUEUED,
            *(RunState(e.data["to"]) for e in events if e.type == "StateChanged"),
        ]
        assert announced == self.path

    def teardown(self):
        if hasattr(self, "database"):
            self.database.close()


def machine_over(url: str) -> type[Runs]:
    """Returns the state machine class for a database."""
    return type("RunsOfDatabase", (Runs,), {"url": url})


def test_the_database_applies_the_transition_table(database_url):
    Database(database_url).close()
    run_state_machine_as_test(
        machine_over(database_url),
        settings=settings(
            max_examples=15,
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
        ),
    )
