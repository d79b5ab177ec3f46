"""Tests of the order and placement of dispatched groups."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.runspec.data import CurriculumSpec
from services.controller.rules.difficulty import Difficulty
from services.controller.rules.ledger import GroupState, Ledger, LedgerState
from services.controller.rules.prompts import Mixture, PromptOrder
from services.controller.run.dispatch.dispatcher import Dispatcher, GenerationError
from services.controller.run.dispatch.sample_index import SampleIndex
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.state.requests import CurrentSpec
from services.wire.controller import GroupFailure
from services.wire.workers import PromptHistory
from tests.helpers.specs import spec_with

SPEC = spec_with(
    rollout={"group_size": 2, "max_response_tokens": 8},
    trainer={"steps": 10},
    algorithm={"max_staleness": 1},
)


class Recorder:
    """Fake journal that writes nothing."""

    async def save(self, ledger):
        ledger.take_changes()


class OneRollout:
    """Fake rollout pool with one rollout that accepts every group."""

    num_replicas = 1

    def __init__(self):
        self.started, self.assignments, self.requests = [], [], []

    def choose(self, holder, *, room):
        self.requests.append((holder, room))
        return "rollout-0", 0

    def assigned(self, worker_id):
        """Does nothing: the pool does not track loads."""

    finished = assigned

    def detach_ending(self):
        """Does nothing: the rollout never ends."""

    def newest_version(self):
        return 0

    async def start(self, by_worker):
        self.assignments += [a for groups in by_worker.values() for a in groups]
        self.started += [a.group_id for groups in by_worker.values() for a in groups]


class EmptyIndex:
    """Fake sample index without samples."""

    def members(self, group):
        return set()

    async def discard(self, groups):
        """Does nothing."""


def handout_of(ledger, *, rows=100, quarantined=(), curriculum=None):
    rollouts = OneRollout()
    chosen = None if curriculum is None else CurriculumSpec.model_validate(curriculum)
    spec = SPEC.model_copy(update={"data": SPEC.data.model_copy(update={"curriculum": chosen})})
    prompt_order = PromptOrder(
        Mixture({"train": rows}),
        seed=0,
        shuffle=False,
        quarantined=quarantined,
        difficulty=None if chosen is None else Difficulty(rows, chosen),
    )
    clock = SimpleNamespace(monotonic=lambda: 1.0)
    dispatcher = Dispatcher(
        CurrentSpec(spec),
        "run_1",
        ledger=ledger,
        prompt_order=prompt_order,
        journal=Recorder(),
        rollout_pool=rollouts,
        sample_index=SampleIndex(None, "run_1/train", group_size=2, required_fields=()),
        clock=clock,
    )
    return dispatcher, rollouts


async def dispatch(dispatcher):
    async with asyncio.TaskGroup() as starts:
        await dispatcher.dispatch(starts)


async def test_as_many_groups_start_as_the_gate_lets_in():
    ledger = Ledger(max_attempts=3)
    dispatcher, rollouts = handout_of(ledger)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    await dispatch(dispatcher)
    assert len(rollouts.started) == 8


async def test_groups_that_wait_after_a_rewind_do_not_pass_the_gate():
    ledger = Ledger(max_attempts=3)
    for row in range(12):
        ledger.issue(row, position=row + 1)
    dispatcher, rollouts = handout_of(ledger)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    assert rollouts.started == [f"g{sequence:08d}" for sequence in range(8)]
    assert ledger.count(GroupState.PENDING) == 4
    dispatcher.published_step = 1
    await dispatch(dispatcher)
    assert len(rollouts.started) == 12


async def test_interrupted_groups_start_first_ordered_by_remaining_tokens():
    ledger = Ledger(max_attempts=3)
    dispatcher, rollouts = handout_of(ledger)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    far, near = ledger.running()[:2]
    ledger.interrupt(far, num_unfinished=2, num_tokens=9)
    ledger.interrupt(near, num_unfinished=1, num_tokens=3)
    rollouts.started.clear()
    await dispatch(dispatcher)
    assert rollouts.started == [near.group_id, far.group_id]


async def test_who_has_computed_a_group_is_known_after_the_run_was_entered_again():
    ledger = Ledger(max_attempts=3)
    dispatcher, _ = handout_of(ledger)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    aside, lost, stalled = ledger.running()[:3]
    ledger.interrupt(aside)
    ledger.park_lost(lost)
    ledger.interrupt(stalled)
    ledger.stall(stalled)
    state = LedgerState(groups=tuple(ledger.in_state(GroupState.PARTIAL)), num_issued=8)
    dispatcher, rollouts = handout_of(Ledger.restore(state, max_attempts=3, now=0.0))
    await dispatch(dispatcher)
    # A group of two samples occupies two slots.
    room = SPEC.rollout.max_running_samples // 2
    assert len(rollouts.requests) >= 3
    assert [request for request in rollouts.requests if request[0]] == [("rollout-0", room)]


async def test_the_function_of_a_curriculum_is_asked_before_a_prompt_is_tried():
    ledger = Ledger(max_attempts=3)
    dispatcher, rollouts = handout_of(ledger, rows=20, curriculum={"function": "mine:wants"})
    dispatcher._prompt_order.difficulty.observe(0, [0.5], step=0)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    tried = [assignment.tried for assignment in rollouts.assignments]
    assert tried[:2] == [
        PromptHistory(step=0, tries=1, mean_reward=0.5),
        PromptHistory(step=0, tries=0, mean_reward=0.0),
    ]
    # The function is called again for a failed group, but not for an interrupted one that it accepted.
    failed, interrupted = ledger.running()[:2]
    ledger.retry(failed, "reward_timeout")
    ledger.interrupt(interrupted, num_tokens=3)
    assert dispatcher.assignment(failed, [0]).tried is not None
    assert dispatcher.assignment(interrupted, [0]).tried is None
    # After as many deferrals as there are rows, prompts are dispatched without a call of the function.
    dispatcher.num_deferred = 20
    assert dispatcher.assignment(failed, [0]).tried is None


async def test_a_group_that_failed_samples_other_responses_and_one_that_was_interrupted_the_same():
    ledger = Ledger(max_attempts=9)
    dispatcher, rollouts = handout_of(ledger)
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    failed, interrupted, first = *ledger.running()[:2], rollouts.assignments
    seeds = {tuple(first[0].seeds)}
    for _ in range(3):
        ledger.retry(failed, "reward_error")
        again = dispatcher.assignment(failed, (0, 1))
        assert again.first_attempt == again.attempt
        seeds.add(again.seeds)
        ledger.lease(failed, "rollout-0", version=0, now=0.0)
    assert len({seed for pair in seeds for seed in pair}) == 8
    ledger.interrupt(interrupted, num_tokens=3)
    again = dispatcher.assignment(interrupted, (0, 1))
    assert (again.attempt, again.first_attempt, again.seeds) == (2, 1, first[1].seeds)


async def test_a_prompt_that_waits_is_passed_over_and_nothing_is_held_against_it():
    ledger = Ledger(max_attempts=1)
    dispatcher, rollouts = handout_of(ledger, curriculum={"function": "mine:wants"})
    dispatcher.published_step = 0
    await dispatch(dispatcher)
    scheduler = GenerationScheduler(
        dispatcher._spec,
        ledger=ledger,
        prompt_order=dispatcher._prompt_order,
        journal=Recorder(),
        rollout_pool=rollouts,
        sample_index=EmptyIndex(),
        dispatcher=dispatcher,
    )
    waits = rollouts.assignments[:3]
    await scheduler.fail(
        [
            GroupFailure(
                group_id=a.group_id,
                attempt=a.attempt,
                reason="deferred",
                message="",
                retryable=True,
                worker_id="rollout-0",
            )
            for a in waits
        ]
    )
    assert ledger.reasons() == {"deferred": 3}
    assert ledger.counts()["quarantined"] == 0
    assert dispatcher.num_deferred == 3
    await dispatch(dispatcher)
    rows = [assignment.row for assignment in rollouts.assignments]
    assert rows == list(range(11))


async def test_a_run_without_prompts_left_is_reported():
    dispatcher, _ = handout_of(Ledger(max_attempts=3), rows=2, quarantined=(0, 1))
    dispatcher.published_step = 0
    async with asyncio.TaskGroup() as starts:
        with pytest.raises(GenerationError, match="quarantined"):
            await dispatcher.dispatch(starts)


def test_a_row_that_is_given_back_comes_once_more_at_the_end_of_its_epoch():
    order = PromptOrder(Mixture({"train": 3}), seed=0, shuffle=False)
    assert [order.next_row() for _ in range(2)] == [0, 1]
    assert order.give_back(0)
    assert not order.give_back(0)
    assert [order.next_row() for _ in range(5)] == [2, 0, 0, 1, 2]
    assert order.position == 6


async def test_a_rollout_that_is_slow_to_take_a_group_keeps_no_other_waiting():
    ledger = Ledger(max_attempts=3)
    dispatcher, rollouts = handout_of(ledger)
    is_asked, takes, is_taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
    start = rollouts.start

    async def start_slowly(by_worker):
        is_asked.set()
        await takes.wait()
        await start(by_worker)

    async def start_at_once(by_worker):
        await start(by_worker)
        is_taken.set()

    async with asyncio.TaskGroup() as starts:
        rollouts.start = start_slowly
        dispatcher.published_step = 0
        await dispatcher.dispatch(starts)
        await is_asked.wait()
        rollouts.start = start_at_once
        dispatcher.published_step = 1
        await dispatcher.dispatch(starts)
        await is_taken.wait()
        assert rollouts.started == [f"g{sequence:08d}" for sequence in range(8, 12)]
        takes.set()
    assert len(rollouts.started) == 12
    assert ledger.count(GroupState.GENERATING) == 12
