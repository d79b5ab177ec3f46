"""Evaluations: the rollouts that answer, the pin on their weights, and every way to end."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.errors import UnavailableError
from services.common.runspec.loader import parse_spec
from services.controller.rules.evaluation import (
    Evaluation,
    EvaluationRecord,
    StartedEvaluation,
)
from services.controller.run.evaluate.evaluator import Evaluator
from services.controller.run.state.requests import CurrentSpec
from services.wire.batch import KVBatchMeta
from services.wire.controller import GroupFailure
from services.wire.transferqueue.types import LostSamples
from tests.helpers.rest import SPEC

ROWS = 3


class Queue:
    """Fake transferqueue that reports the batches and losses that a test puts into it."""

    def __init__(self):
        self.batches, self.losses = asyncio.Queue(), asyncio.Queue()
        self.released, self.on_release = [], lambda: None

    async def watch(self, partition, revision):
        while True:
            yield await self.batches.get()

    async def watch_lost_samples(self, partition):
        while True:
            yield await self.losses.get()

    async def get_batch(self, partition):
        return KVBatchMeta(partition_id=partition, keys=())

    async def release(self, partition, keys):
        on_release, self.on_release = self.on_release, lambda: None
        on_release()
        await asyncio.sleep(0.01)
        self.released += keys


class Rollouts:
    """Fake rollout pool that accepts groups, which a test may finish."""

    def __init__(self):
        self.started, self.cancelled, self.interrupted = {}, [], []
        self.reserved = set()
        self.has_started = asyncio.Event()

    def present(self):
        return [
            name for name in ("rollout-0", "rollout-1", "rollout-2") if name not in self.reserved
        ]

    def reserve(self, count):
        reserved = self.present()[:count]
        self.reserved |= set(reserved)
        return reserved

    def unreserve(self, names):
        self.reserved -= set(names)

    async def interrupt(self, names):
        self.interrupted += names

    async def start(self, by_worker):
        self.started = by_worker
        self.has_started.set()

    async def cancel(self, group_ids):
        self.cancelled += group_ids


class Weights:
    """Fake weight session with the pin and the reserved rollouts."""

    def __init__(self):
        self.pin = asyncio.Lock()
        self.version = -1
        self.reserved = set()

    def reserve(self, names):
        assert self.pin.locked()
        self.reserved |= set(names)

    def unreserve(self, names):
        self.reserved -= set(names)


class Stage:
    """Evaluator with running tasks and fake collaborators."""

    def __init__(self, tasks, **validation):
        self.queue, self.rollouts, self.weights = Queue(), Rollouts(), Weights()
        self.notes, self.request, self.answered = [], None, []
        spec = parse_spec(
            {
                **SPEC,
                "rollout": {**SPEC["rollout"], "replicas": 3, "partial_rollout": True},
                "data": {**SPEC["data"], "heldout": SPEC["data"]["train"]},
                "validation": {"every": 2, **validation},
            }
        )
        connections = SimpleNamespace(
            heldout_rows={"heldout": ROWS},
            attempt=1,
            rollout_pool=self.rollouts,
            weights=self.weights,
        )

        async def on_change(what, request):
            self.notes.append(what)
            if isinstance(what, Evaluation):
                self.answered.append(request)

        self.evaluator = Evaluator(
            CurrentSpec(spec),
            "run_1",
            connections,
            queue=self.queue,
            request_queue=SimpleNamespace(get=lambda kind: self.request),
        )
        self.evaluator.report_to(on_change)
        self.tasks = [
            tasks.create_task(self.evaluator.run()),
            tasks.create_task(self.evaluator.collect()),
            tasks.create_task(self.evaluator.exclude_lost()),
        ]

    @property
    def results(self):
        ended = [what for what in self.notes if isinstance(what, Evaluation)]
        return [(result.version, result.status, result.num_samples) for result in ended]

    def answer(self, *, finish_reason="stop", but=()):
        """Reports two samples for each started group, except for the groups in ``but``."""
        for groups in self.rollouts.started.values():
            for group in groups:
                if group.group_id not in but:
                    self.queue.batches.put_nowait(samples_of(group.group_id, finish_reason))

    def end(self):
        for task in self.tasks:
            task.cancel()


def samples_of(group_id, finish_reason="stop"):
    return KVBatchMeta(
        partition_id="run_1/validation",
        keys=(f"{group_id}.0", f"{group_id}.1"),
        tags={
            "group_id": (group_id, group_id),
            "reward": (1.0, 0.0),
            "answer": ("a", "b"),
            "data_source": ("math", "math"),
            "finish_reason": (finish_reason, finish_reason),
            "terms": ('{"right": 1}', '{"right": 0}'),
            "greedy": (1, 0),
        },
    )


async def test_shared_rollouts_all_answer_while_the_weights_wait():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        assert stage.weights.pin.locked()
        assert sorted(stage.rollouts.started) == ["rollout-0", "rollout-1", "rollout-2"]
        stage.answer()
        await stage.evaluator.wait_idle()
        assert not stage.weights.pin.locked()
        assert stage.notes[0] == StartedEvaluation(4, 4, "periodic")
        assert stage.results == [(4, "ok", 6)]
        assert len(stage.queue.released) == 6
        stage.end()


async def test_reserved_rollouts_answer_while_new_weights_go_to_the_others():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, replicas=1)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        assert not stage.weights.pin.locked()
        assert stage.weights.reserved == stage.rollouts.reserved == {"rollout-0"}
        assert list(stage.rollouts.started) == stage.rollouts.interrupted == ["rollout-0"]
        await stage.evaluator.published(5, step=5)
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.weights.reserved == stage.rollouts.reserved == set()
        assert stage.results == [(4, "ok", 6)]
        stage.end()


async def test_a_version_that_is_served_during_an_evaluation_does_not_answer_its_request_again():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, every=0, replicas=1)
        await stage.evaluator.published(4, step=4)
        stage.request = object()
        await stage.evaluator.evaluate_served()
        await stage.rollouts.has_started.wait()
        await stage.evaluator.published(5, step=5)
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 6)]
        stage.end()


@pytest.mark.parametrize("has_rollouts", [True, False])
async def test_a_version_that_is_served_before_a_request_is_handled_answers_it_once(has_rollouts):
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, every=0)
        stage.request = object()  # the request is stored, but the evaluator has not been notified
        await stage.evaluator.published(4, step=4)
        if has_rollouts:
            await stage.rollouts.has_started.wait()
        await stage.evaluator.evaluate_served()
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        await asyncio.sleep(0.01)
        assert stage.results == [(4, "ok", 6)]
        assert stage.answered == [stage.request]
        assert not stage.evaluator.is_busy
        stage.end()


async def test_a_request_during_an_evaluation_gets_its_own():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        stage.rollouts.has_started.clear()
        stage.request = object()
        await stage.evaluator.evaluate_served()
        stage.answer()
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 6)] * 2
        assert stage.answered == [None, stage.request]
        stage.end()


async def test_an_evaluation_ends_while_weights_are_published():
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        stage = Stage(tasks, replicas=1)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        async with stage.weights.pin:  # as during the trainer's turn on shared GPUs
            stage.answer()
            await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 6)]
        assert stage.weights.reserved == stage.rollouts.reserved == set()
        stage.end()


async def test_an_evaluation_that_is_cancelled_waits_for_no_publication():
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        stage = Stage(tasks, replicas=1)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        async with stage.weights.pin:  # as during the trainer's turn on shared GPUs
            stage.end()
            await asyncio.wait(stage.tasks)
        assert stage.rollouts.reserved == set()


async def test_the_failure_of_an_evaluation_is_reported_before_the_next_publication():
    async def refuse(by_worker):
        raise UnavailableError("this replica is ending")

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
            stage = Stage(tasks, replicas=1)
            interrupts, may_start = asyncio.Event(), asyncio.Event()

            async def interrupt(names):
                interrupts.set()
                await may_start.wait()

            stage.rollouts.interrupt, stage.rollouts.start = interrupt, refuse
            await stage.evaluator.published(4, step=4)
            await interrupts.wait()
            await stage.weights.pin.acquire()  # as during the trainer's turn on shared GPUs
            may_start.set()
            await asyncio.Event().wait()
    assert [str(error) for error in caught.value.exceptions] == ["this replica is ending"]
    assert stage.rollouts.reserved == set()


async def test_the_final_version_is_evaluated_on_all_rollouts():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, replicas=1)
        await stage.evaluator.published(3, step=3, is_last=True)
        await stage.rollouts.has_started.wait()
        assert len(stage.rollouts.started) == 3
        stage.answer()
        await stage.evaluator.wait_idle()
        stage.end()


async def test_a_version_that_is_replaced_before_it_can_be_pinned_is_reported_as_missed():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        async with stage.weights.pin:  # as during a publication
            await stage.evaluator.published(4, step=4)
            await stage.evaluator.published(5, step=5)
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "missed", 0)]
        assert not stage.weights.pin.locked()
        stage.end()


async def test_a_version_is_skipped_if_its_successor_is_served_already():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        async with stage.weights.pin:
            await stage.evaluator.published(4, step=4)
            stage.weights.version = 5
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "missed", 0)]
        stage.end()


async def test_a_version_that_is_evaluated_again_is_answered_again():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.published(4, step=4)
        group_ids = []
        for _ in range(2):
            await stage.rollouts.has_started.wait()
            stage.rollouts.has_started.clear()
            group_ids += [
                group.group_id for groups in stage.rollouts.started.values() for group in groups
            ]
            stage.answer()
            await stage.evaluator.wait_idle()
            stage.request = object()
            await stage.evaluator.evaluate_served()
        assert len(set(group_ids)) == len(group_ids) == 2 * ROWS
        assert stage.results == [(4, "ok", 6)] * 2
        stage.end()


@pytest.mark.parametrize(
    ("begun", "served", "reason"),
    [
        (StartedEvaluation(4, 4, "manual"), 4, "manual"),
        (StartedEvaluation(4, 4, "manual"), 5, "manual"),
        (StartedEvaluation(2, 2, "periodic"), 4, "periodic"),
        (StartedEvaluation(0, 0, "initial"), 5, "periodic"),
    ],
)
async def test_an_interrupted_evaluation_is_repeated_under_its_weights_or_reported_as_missed(
    begun, served, reason
):
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        record = EvaluationRecord(settled_step=begun.step, begun=begun)
        await stage.evaluator.restore(record, num_steps=9)
        assert stage.evaluator.interrupted == begun.version
        await stage.evaluator.published(served, step=served)
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.evaluator.interrupted is None
        missed = [] if served == begun.version else [(begun.version, "missed", 0)]
        assert stage.results == [*missed, (served, "ok", 6)]
        assert StartedEvaluation(served, served, reason) in stage.notes
        stage.end()


@pytest.mark.parametrize(("served", "missed"), [(4, []), (5, [(4, "missed", 0)])])
async def test_an_evaluation_that_was_due_before_a_loss_is_not_forgotten(served, missed):
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        # Version 4 was served, and the run was lost before its evaluation began.
        record = EvaluationRecord(versions=frozenset({2}), settled_step=2, served=((3, 3), (4, 4)))
        await stage.evaluator.restore(record, num_steps=9)
        assert stage.evaluator.interrupted == 4
        await stage.evaluator.published(served, step=served)
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.results == [*missed, (served, "ok", 6)]
        stage.end()


async def test_each_evaluation_that_was_due_before_a_loss_is_reported():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        # Versions 4 and 6 waited for the evaluation of version 2.
        begun = StartedEvaluation(2, 2, "periodic")
        served = ((2, 2), (4, 4), (5, 5), (6, 6), (7, 7))
        record = EvaluationRecord(settled_step=1, begun=begun, served=served)
        await stage.evaluator.restore(record, num_steps=9)
        await stage.evaluator.published(7, step=7)
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        missed = [(version, "missed", 0) for version in (2, 4, 6)]
        assert stage.results == [*missed, (7, "ok", 6)]
        stage.end()


async def test_steps_before_a_loss_whose_weights_were_never_served_are_evaluated_with_the_next():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        record = EvaluationRecord(versions=frozenset({2}), settled_step=2, served=((3, 3),))
        await stage.evaluator.restore(record, num_steps=9)
        assert stage.evaluator.interrupted is None
        await stage.evaluator.published(5, step=5)
        await stage.rollouts.has_started.wait()
        assert stage.notes == [StartedEvaluation(5, 5, "periodic")]
        stage.answer()
        await stage.evaluator.wait_idle()
        stage.end()


async def test_a_queued_evaluation_that_is_replaced_is_reported_as_missed():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, replicas=1)
        await stage.evaluator.published(2, step=2)
        await stage.rollouts.has_started.wait()
        await stage.evaluator.published(4, step=4)
        await stage.evaluator.published(6, step=6)
        assert stage.results == [(4, "missed", 0)]
        stage.rollouts.has_started.clear()
        stage.answer()
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "missed", 0), (2, "ok", 6), (6, "ok", 6)]
        stage.end()


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_an_evaluation_that_takes_too_long_is_reported_and_gives_everything_back(is_pinned):
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, timeout_s=0.05)
        if is_pinned:
            await stage.weights.pin.acquire()
        await stage.evaluator.published(4, step=4)
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "timeout", 0)]
        assert stage.weights.pin.locked() == is_pinned
        assert len(stage.rollouts.cancelled) == (0 if is_pinned else ROWS)
        stage.end()


async def test_samples_that_come_too_late_are_deleted_and_never_counted():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        late = samples_of("v000002-1-000000")
        stage.queue.batches.put_nowait(late)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        stage.answer()
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 6)]
        assert stage.queue.released[:2] == list(late.keys)
        stage.end()


async def test_samples_that_come_while_the_others_are_deleted_are_deleted_too():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, timeout_s=0.05)
        stage.queue.on_release = lambda: stage.answer(but=("v000004-1-000001",))
        await stage.evaluator.published(4, step=4)
        await stage.evaluator.wait_idle()
        stage.request = object()
        await stage.evaluator.evaluate_served()
        await stage.evaluator.wait_idle()
        assert [status for _, status, _ in stage.results] == ["timeout"] * 2
        assert len(set(stage.queue.released)) == 4
        stage.end()


async def test_a_sample_without_a_reward_is_no_wrong_answer():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        stage.answer(finish_reason="failed", but=("v000004-1-000001",))
        failure = GroupFailure(
            group_id="v000004-1-000001", attempt=1, reason="timeout", message="", retryable=True
        )
        await stage.evaluator.fail([failure])
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 0)]
        stage.end()


async def test_what_a_shard_took_with_it_is_not_waited_for():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.published(4, step=4)
        await stage.rollouts.has_started.wait()
        lost_samples = samples_of("v000004-1-000001")
        stage.queue.batches.put_nowait(lost_samples.select(lost_samples.keys[:1]))
        await asyncio.sleep(0)
        stage.queue.losses.put_nowait(LostSamples(keys=lost_samples.keys, shard_id="shard-1"))
        stage.answer(but=("v000004-1-000001",))
        await stage.evaluator.wait_idle()
        assert stage.results == [(4, "ok", 5)]
        stage.end()


@pytest.mark.parametrize(
    ("validation", "is_evaluated"),
    [
        ({"every": 0}, False),
        ({"every": 2}, True),
        ({"every": 2, "before_train": False}, False),
        ({"every": 0, "before_train": True}, True),
        ({"every": 0, "only": True}, True),
    ],
)
async def test_initial_weights_are_evaluated_if_later_ones_are_or_on_request(
    validation, is_evaluated
):
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks, **validation)
        await stage.evaluator.published(0, step=0)
        assert stage.evaluator.is_busy is is_evaluated
        stage.end()


async def test_versions_between_the_periodic_ones_are_not_evaluated():
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(tasks)
        await stage.evaluator.restore(EvaluationRecord(settled_step=2), num_steps=9)
        await stage.evaluator.published(3, step=3)
        assert not stage.evaluator.is_busy
        stage.end()
