"""Tests that a run fails if no group succeeds anymore, but not if all running groups fail once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.controller.run.dispatch.dispatcher import GenerationError
from services.controller.run.dispatch.scheduler import GroupFailures, failed
from services.controller.run.state.requests import CurrentSpec
from services.wire.controller import GroupFailure
from tests.helpers.specs import spec_with


def failures(max_staleness: int) -> GroupFailures:
    """Returns the failure handler of a run with two prompts per step whose groups are retried."""
    spec = spec_with(trainer={"prompts_per_step": 2}, algorithm={"max_staleness": max_staleness})
    prompt_order: Any = SimpleNamespace(mixture=SimpleNamespace(name=lambda row: f"row {row}"))
    prompt_order.quarantine = lambda row: None
    ledger: Any = SimpleNamespace(
        retry=lambda group, reason: True, quarantine=lambda group, reason: None
    )
    dispatcher: Any = SimpleNamespace(record_failure=lambda why: None)
    return GroupFailures(
        CurrentSpec(spec), ledger=ledger, prompt_order=prompt_order, dispatcher=dispatcher
    )


def group_failure(reason: str, *, retryable: bool) -> GroupFailure:
    return GroupFailure(
        group_id="g1", attempt=1, reason=reason, message="it fails", retryable=retryable
    )


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_a_run_survives_the_failure_of_all_that_runs_and_ends_when_nothing_succeeds(
    max_staleness: int,
) -> None:
    group_failures = failures(max_staleness)
    failure = group_failure("environment_failed", retryable=True)
    group: Any = SimpleNamespace(row=7)
    num_running = 2 * (1 + max_staleness)
    for _ in range(num_running):
        group_failures.count_failure(group, failure)
    group_failures.raise_if_all_fail()
    for _ in range(6):
        group_failures.count_failure(group, failure)
    with pytest.raises(GenerationError, match="row 7: env"):
        group_failures.raise_if_all_fail()
    group_failures.reset_failures()
    group_failures.raise_if_all_fail()


def test_many_rows_that_are_too_long_do_not_end_a_run() -> None:
    group_failures = failures(0)
    failure = group_failure("prompt_too_long", retryable=False)
    group: Any = SimpleNamespace(row=7)
    for _ in range(100):
        group_failures.count_failure(group, failure)
    group_failures.raise_if_all_fail()


def test_the_event_of_a_failed_group_names_its_row_once() -> None:
    failure = group_failure("reward_exception", retryable=True)
    note = failed(failure, "row 7 of data.train")
    assert note.message == "g1 (row 7 of data.train): reward_exception: it fails"
    named = replace(failure, message="row 7 of data.train has an empty prompt")
    assert failed(named, "row 7 of data.train").message.count("row 7") == 1
