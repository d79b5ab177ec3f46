"""Tests of groups with more members than a rollout has slots, which are split among several rollouts."""

import asyncio
from types import SimpleNamespace

import pytest

from services.controller.rules.ledger import RUNNING, GroupState, Ledger
from services.controller.rules.placement import split
from services.controller.rules.prompts import Mixture, PromptOrder
from services.controller.run.dispatch.dispatcher import Dispatcher
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.dispatch.sample_index import SampleIndex
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.state.requests import CurrentSpec
from services.wire.batch import KVBatchMeta
from services.wire.controller import GroupFailure
from services.wire.transferqueue.types import LostSamples
from tests.helpers.specs import spec_with

SPEC = spec_with(
    rollout={"group_size": 5, "max_running_samples": 2, "replicas": 3},
    trainer={"prompts_per_step": 1},
    algorithm={"max_staleness": 0},
)


class Recorder:
    """Fake journal that records calls."""

    def __init__(self):
        self.notes, self.messages = [], []

    async def save(self, ledger):
        ledger.take_changes()

    async def record_event(self, note, ledger):
        ledger.take_changes()
        self.notes.append(note.type)
        self.messages.append(note.message)


class Queue:
    """Fake transferqueue that records deletions and stores no samples."""

    def __init__(self):
        self.released, self.losses = [], []
        self.batch = KVBatchMeta(partition_id="run_1/train", keys=())

    async def release(self, partition, keys, attempts=()):
        self.released += keys

    async def get_batch(self, partition):
        return self.batch

    async def watch(self, partition, revision):
        yield self.batch

    async def watch_lost_samples(self, partition):
        for keys in self.losses:
            yield LostSamples(keys=keys, shard_id="shard-1")


class Rollouts(RolloutPool):
    """Pool of three rollouts that accept every group."""

    def __init__(self):
        super().__init__()
        self.started = {}
        self.cancelled, self.put_aside_by_name = [], []
        for number in range(3):
            worker = SimpleNamespace(weight_version=0, gauges={}, state="ready", is_cut_off=False)
            self._workers[f"rollout-{number}"] = worker
            self._clients[f"rollout-{number}"] = None
            self._placement.add(f"rollout-{number}")

    async def start(self, by_worker):
        for worker_id, assignments in by_worker.items():
            for assignment in assignments:
                self.started[worker_id] = assignment

    def cut_off_from(self, address, *names):
        """Makes exactly the named rollouts report that they cannot reach an address."""
        for name, worker in self._workers.items():
            worker.is_cut_off = name in names
            worker.activity = f"{address} is unreachable" if name in names else ""

    async def cancel(self, group_ids):
        self.cancelled += group_ids

    async def park_groups(self, group_ids):
        self.put_aside_by_name += group_ids


class Run:
    """Run with one group."""

    def __init__(self, ledger=None, spec=SPEC):
        self.queue, self.rollouts, self.journal = Queue(), Rollouts(), Recorder()
        self.ledger, self.now = ledger or Ledger(max_attempts=3), 1.0
        prompt_order = PromptOrder(Mixture({"train": 10}), seed=0, shuffle=False)
        sample_index = SampleIndex(self.queue, "run_1/train", group_size=5, required_fields=())
        shared = {
            "ledger": self.ledger,
            "prompt_order": prompt_order,
            "journal": self.journal,
            "rollout_pool": self.rollouts,
            "sample_index": sample_index,
        }
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.spec = CurrentSpec(spec)
        self.dispatcher = Dispatcher(self.spec, "run_1", clock=clock, **shared)
        self.dispatcher.published_step = 0
        self.generation = GenerationScheduler(self.spec, dispatcher=self.dispatcher, **shared)

    @property
    def group(self):
        (group,) = self.ledger.in_state(*GroupState)
        return group

    async def dispatch(self):
        """Dispatches the group and returns the members that each rollout got."""
        self.rollouts.started.clear()
        async with asyncio.TaskGroup() as starts:
            await self.dispatcher.dispatch(starts)
        return {name: assignment.members for name, assignment in self.rollouts.started.items()}

    async def bring(self, *members, attempt):
        """Stores samples and lets the scheduler collect them."""
        self.store(*members, attempt=attempt)
        await self.generation.collect()

    def store(self, *members, attempt, reward=float, finish_reason="stop"):
        """Stores samples without a report to the scheduler.

        Args:
            reward: Returns the reward of a member.
        """
        name = self.group.group_id
        tags = {
            "group_id": (name,) * len(members),
            "member": members,
            "attempt": (attempt,) * len(members),
            "v_min": (0,) * len(members),
            "reward": tuple(reward(member) for member in members),
            "finish_reason": (finish_reason,) * len(members),
            "response_tokens": (4,) * len(members),
            "terms": ("{}",) * len(members),
            "greedy": (0,) * len(members),
        }
        keys = tuple(f"{name}.{member}" for member in members)
        batch = KVBatchMeta(partition_id="run_1/train", keys=keys, tags=tags)
        self.queue.batch = batch

    async def fail(self, worker_id, reason, **progress):
        """Reports a failure of the group on a rollout."""
        failure = GroupFailure(
            group_id=self.group.group_id,
            attempt=self.group.attempt,
            worker_id=worker_id,
            reason=reason,
            message="",
            retryable=True,
            **progress,
        )
        await self.generation.fail([failure])


async def test_a_group_that_exceeds_the_free_slots_of_a_rollout_is_sharded_and_whole_in_the_end():
    run = Run()
    shares = await run.dispatch()
    assert shares == {"rollout-0": (0, 1), "rollout-1": (2, 3), "rollout-2": (4,)}
    assignments = run.rollouts.started.values()
    assert len({seed for assignment in assignments for seed in assignment.seeds}) == 5
    assert {len(assignment.temperatures) for assignment in assignments} == {1, 2}
    for members in ((2, 3), (4,), (0, 1)):
        assert run.group.state is GroupState.GENERATING
        await run.bring(*members, attempt=1)
    assert run.group.state is GroupState.READY
    meta = run.generation.sample_index.meta([run.group])
    assert sorted(meta.tag("member")) == [0, 1, 2, 3, 4]
    assert run.rollouts.choose_several(3)[0] == ["rollout-1", "rollout-2", "rollout-0"]


async def test_a_parked_shard_continues_without_the_finished_shards():
    run = Run()
    await run.dispatch()
    await run.fail("rollout-0", "interrupted", num_unfinished=2, num_tokens=7)
    await run.fail("rollout-0", "interrupted", num_unfinished=2, num_tokens=7)
    assert run.group.state is GroupState.GENERATING
    await run.bring(4, attempt=1)
    await run.fail("rollout-1", "interrupted", num_unfinished=1, num_tokens=5)
    assert run.group.state is GroupState.PARTIAL
    assert (run.group.num_unfinished, run.group.num_tokens) == (3, 12)
    shares = await run.dispatch()
    assert sorted(shares.values()) == [(0, 1), (2, 3)]
    await run.bring(0, 1, attempt=1)
    assert run.queue.released == [f"{run.group.group_id}.{member}" for member in (0, 1)]
    await run.bring(0, 1, attempt=2)
    await run.bring(2, 3, attempt=2)
    assert run.group.state is GroupState.READY


async def test_a_shard_whose_sibling_was_parked_ends_the_attempt_when_it_arrives():
    run = Run()
    await run.dispatch()
    await run.bring(2, 3, attempt=1)
    await run.fail("rollout-0", "interrupted")
    await run.bring(4, attempt=1)
    assert run.group.state is GroupState.PARTIAL
    assert await run.dispatch() == {"rollout-0": (0, 1)}


@pytest.mark.parametrize("reason", ["reward_timeout", "publish_failed"])
async def test_a_failed_shard_cancels_the_others_and_restarts_the_group(reason):
    run = Run()
    await run.dispatch()
    await run.bring(2, 3, attempt=1)
    await run.fail("rollout-0", reason)
    name = run.group.group_id
    assert run.group.state is GroupState.PENDING
    assert run.rollouts.cancelled == [name]
    assert run.queue.released == [f"{name}.2", f"{name}.3"]
    await run.bring(4, attempt=1)
    assert run.queue.released[2:] == [f"{name}.4"]
    shares = await run.dispatch()
    assert sorted(member for members in shares.values() for member in members) == [0, 1, 2, 3, 4]


async def test_a_restart_that_is_dispatched_while_the_failure_is_recorded_is_not_cancelled():
    run = Run()
    await run.dispatch()
    await run.bring(2, 3, attempt=1)
    name, deleted = run.group.group_id, []
    record = run.journal.record_event

    async def record_event(note, ledger):
        await record(note, ledger)
        await run.dispatch()
        await run.bring(2, 3, attempt=2)
        assert run.rollouts.cancelled == [name]
        deleted.extend(run.queue.released)

    run.journal.record_event = record_event
    await run.fail("rollout-0", "reward_timeout")
    assert deleted == run.queue.released == [f"{name}.2", f"{name}.3"]
    assert run.rollouts.cancelled == [name]
    for members in ((0, 1), (4,)):
        await run.bring(*members, attempt=2)
    assert run.group.state is GroupState.READY


async def test_groups_without_free_slots_are_reported_once_per_step():
    run = Run()
    for steps in (1, 2):
        for _ in range(3):
            await run.dispatch()
            await run.fail("rollout-0", "publish_failed")
        assert run.generation._journal.notes == ["GroupFailed"] * steps
        run.generation.batch_taken()


async def test_a_group_of_rollouts_that_make_no_token_is_taken_from_all_of_them():
    run = Run()
    await run.dispatch()
    began = run.group.oldest_version
    await run.bring(2, 3, attempt=1)
    for hours in range(3):
        run.now = hours * 3600.0
        run.rollouts._workers["rollout-0"].gauges["tokens_total"] = min(hours, 1)
        await run.dispatcher.reclaim_stalled()
        # A group that makes progress is not reclaimed, regardless of its age.
        assert (run.group.state is GroupState.PARTIAL) == (hours == 2)
    name = run.group.group_id
    # The stored tokens continue on another rollout and keep their version.
    assert run.group.oldest_version == began
    assert run.rollouts.put_aside_by_name == [name]
    # Samples that still lack a field are deleted too, because the worker that adds it is gone.
    assert run.queue.released == [f"{name}.{member}" for member in range(5)]
    assert not run.dispatcher.shards.workers(name)


async def test_shared_groups_begin_again_when_the_controller_does():
    run = Run()
    await run.dispatch()
    again = Run(run.ledger)
    await again.generation.restore((), is_queue_empty=False)
    assert again.group.state is GroupState.PENDING
    assert again.rollouts.cancelled == [again.group.group_id]
    assert not again.rollouts.started


UNFIT = {
    "equal_rewards": ({"dynamic_sampling": True}, {"reward": lambda member: 1.0}),
    "too_few_members": ({"min_group_size": 2}, {"finish_reason": "failed"}),
}


@pytest.mark.parametrize("is_found", [True, False], ids=["found at recovery", "collected"])
@pytest.mark.parametrize("reason", UNFIT)
async def test_an_unfit_group_is_never_ready_however_it_arrives(reason, is_found):
    algorithm, samples = UNFIT[reason]
    spec = spec_with(
        rollout={"group_size": 5, "max_running_samples": 5, "replicas": 3},
        trainer={"prompts_per_step": 1},
        algorithm={"max_staleness": 0, **algorithm},
    )
    run = Run(spec=spec)
    await run.dispatch()
    name, ready_counts = run.group.group_id, []
    again = Run(run.ledger, spec) if is_found else run
    again.queue.batch = KVBatchMeta(partition_id="run_1/train", keys=())
    again.store(*range(5), attempt=1, **samples)
    release = again.queue.release

    async def released(*arguments):
        ready_counts.append(again.ledger.count(GroupState.READY))
        await release(*arguments)

    again.queue.release = released
    if is_found:
        await again.generation.restore((), is_queue_empty=False)
    else:
        await again.generation.collect()
    assert again.ledger.reasons() == {reason: 1}
    assert again.ledger.count(GroupState.READY) == 0
    assert set(ready_counts) == {0}
    assert again.queue.released == [f"{name}.{member}" for member in range(5)]
    assert not again.ledger.take_changes().ended, "the drop was not recorded"


def test_shares_are_equal_as_far_as_that_goes():
    assert split(range(7), ["a", "b", "c"]) == {
        "a": range(3),
        "b": range(3, 5),
        "c": range(5, 7),
    }
    assert split([4, 9], ["a"]) == {"a": [4, 9]}


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2, 3, 4)], ids=["running", "ready"])
async def test_a_group_that_lost_samples_restarts(members):
    run = Run()
    await run.dispatch()
    await run.bring(*members, attempt=1)
    name = run.group.group_id
    run.queue.losses = [(f"{name}.0", f"{name}.1")]
    run.queue.batch = KVBatchMeta(partition_id="run_1/train", keys=())
    await run.generation.replace_lost()
    assert (run.group.state, run.group.attempt) == (GroupState.PENDING, 2)
    assert {f"{name}.{member}" for member in members} <= set(run.queue.released)
    assert run.rollouts.cancelled == ([name] if len(members) < 5 else [])
    assert await run.dispatch() == {"rollout-0": (0, 1), "rollout-1": (2, 3), "rollout-2": (4,)}


async def test_an_attempt_that_begins_while_lost_samples_are_handled_goes_on():
    run = Run()
    await run.dispatch()

    async def cancel(group_ids):
        for worker_id in ("rollout-0", "rollout-1", "rollout-2"):
            await run.fail(worker_id, "interrupted")
        await run.dispatch()

    run.rollouts.cancel = cancel
    run.queue.losses = [(f"{run.group.group_id}.2",)]
    await run.generation.replace_lost()
    assert (run.group.state, run.group.attempt) == (GroupState.GENERATING, 2)


async def test_a_group_that_is_whole_again_is_not_lost():
    run = Run()
    await run.dispatch()
    await run.bring(0, 1, 2, 3, 4, attempt=1)
    run.queue.losses = [(f"{run.group.group_id}.0",), ("g00000077.0",), ("v000001-000001.0",)]
    await run.generation.replace_lost()
    assert (run.group.state, run.group.attempt) == (GroupState.READY, 1)


@pytest.mark.parametrize("is_partial", [True, False])
async def test_rollouts_that_leave_hand_over_what_they_have_and_get_no_more(is_partial):
    run = Run()
    rollout = SPEC.rollout.model_copy(update={"partial_rollout": is_partial})
    run.spec.now = SPEC.model_copy(update={"rollout": rollout})
    members_by_rollout = await run.dispatch()
    assert members_by_rollout.keys() == {"rollout-0", "rollout-1", "rollout-2"}
    await run.generation.reclaim_from_leaving(["rollout-1"])
    assert run.rollouts.put_aside_by_name == ([run.group.group_id] if is_partial else [])
    # The other rollouts continue the group, parked or not, and no call waits for the removed rollout.
    assert (run.group.state, run.rollouts.cancelled) == (GroupState.PARTIAL, [run.group.group_id])
    assert run.rollouts.num_replicas == 2
    assert "rollout-1" not in run.rollouts.choose_several(3)[0]
    run.rollouts.remove(["rollout-1"])
    assert sorted(await run.dispatch()) == ["rollout-0", "rollout-2"]


async def test_what_leaving_rollouts_have_finished_is_taken_in_as_any_other():
    run = Run()
    await run.dispatch()
    run.store(0, 1, 2, 3, 4, attempt=1)
    await run.generation.reclaim_from_leaving(["rollout-1"])
    await run.generation.collect()
    assert (run.group.state, run.rollouts.cancelled) == (GroupState.READY, [])


async def test_groups_of_a_rollout_that_is_cut_off_from_the_transferqueue_go_to_the_others():
    run = Run()
    await run.dispatch()
    run.rollouts.cut_off_from("tq:1", "rollout-1")
    await run.generation.update_cut_off()
    await run.generation.update_cut_off()
    assert run.journal.notes == ["RolloutCutOff"]
    assert "tq:1" in run.journal.messages[0]
    assert (run.group.state, run.rollouts.cancelled) == (GroupState.PARTIAL, [run.group.group_id])
    assert run.rollouts.present() == ["rollout-0", "rollout-2"]
    assert sorted(await run.dispatch()) == ["rollout-0", "rollout-2"]
    run.rollouts.cut_off_from("")
    await run.generation.update_cut_off()
    assert run.journal.notes == ["RolloutCutOff", "RolloutReconnected"]
    assert "rollout-1" in run.rollouts.choose_several(3)[0]


async def test_if_all_rollouts_are_cut_off_their_groups_wait_where_they_are():
    run = Run()
    await run.dispatch()
    run.rollouts.cut_off_from("tq:1", "rollout-0", "rollout-1", "rollout-2")
    await run.generation.update_cut_off()
    assert (run.group.state in RUNNING, run.rollouts.cancelled) == (True, [])
    assert len(run.rollouts.present()) == 3
    run.rollouts.cut_off_from("tq:1", "rollout-1", "rollout-2")
    await run.generation.update_cut_off()
    assert run.group.state is GroupState.PARTIAL


async def test_a_rollout_that_leaves_while_it_is_cut_off_gets_no_groups_when_it_is_back():
    run = Run()
    run.rollouts.cut_off_from("tq:1", "rollout-1")
    await run.generation.update_cut_off()
    run.rollouts.detach(["rollout-1"])
    run.rollouts.cut_off_from("")
    await run.generation.update_cut_off()
    assert sorted(await run.dispatch()) == ["rollout-0", "rollout-2"]


async def test_a_draining_rollout_gets_no_groups():
    run = Run()
    run.rollouts._workers["rollout-1"].state = "draining"
    assert sorted(await run.dispatch()) == ["rollout-0", "rollout-2"]


async def test_removed_rollouts_without_groups_interrupt_no_others():
    run = Run()
    await run.generation.reclaim_from_leaving(["rollout-1"])
    assert run.rollouts.put_aside_by_name == []
