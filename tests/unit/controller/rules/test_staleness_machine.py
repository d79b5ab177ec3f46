"""Tests that the rules keep the staleness bound through any sequence of kills of any service.

The state machine models the state of each service: the ledger, tokens in rollouts, progress and samples in
the transferqueue, its snapshots, and the trainer's steps. Each rule is an action of a run or the death of a
service.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.controller.rules.ledger import (
    RUNNING,
    WAITING,
    Group,
    GroupState,
    Ledger,
    LedgerState,
)
from services.controller.rules.staleness import StalenessGate, choose_batch, resume_order

WORKERS = ("rollout-0", "rollout-1")
PLACES = 8


@dataclass
class StartedGroup:
    """Group that runs on a rollout."""

    attempt: int
    worker: str
    versions: list[int] = field(default_factory=list)


@dataclass
class Queue:
    """State of the transferqueue: attempt and token versions by group."""

    progress: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    samples: dict[int, tuple[int, list[int]]] = field(default_factory=dict)


class Run(RuleBasedStateMachine):
    """State machine of a run with two rollouts and ``on_stale: wait``: batches wait for due groups."""

    @initialize(bound=st.integers(0, 4), size=st.integers(1, 3))
    def begin(self, bound, size):
        self.gate = StalenessGate(max_staleness=bound, groups_per_step=size)
        self.ledger = Ledger(max_attempts=1000)
        self.step = self.offset = self.published = 0
        self.started_groups: dict[int, StartedGroup] = {}
        self.forgotten: list[tuple[int, StartedGroup]] = []
        self.queue, self.snapshot = Queue(), Queue()
        self.is_queue_lost = False
        self.lost: set[str] = set()

    @property
    def version(self):
        return self.step + self.offset

    def group(self, sequence):
        return self.ledger.get(f"g{sequence:08d}")

    def chosen(self, index, *states):
        groups = self.ledger.in_state(*states)
        return groups[index % len(groups)] if groups else None

    # Actions of rollouts and controller.

    @rule(worker=st.sampled_from(WORKERS), decodes=st.booleans())
    def dispatch(self, worker, decodes):
        """Dispatches resumed groups first, then those that the gate admits."""
        served = self.published + self.offset
        free = PLACES - self.ledger.count(*RUNNING)
        groups = resume_order(
            self.ledger.in_state(GroupState.PARTIAL), gate=self.gate, weight_version=served
        )[:free]
        waiting = self.ledger.in_state(GroupState.PENDING)
        room = self.gate.capacity(
            published=self.published,
            num_admitted=self.ledger.num_admitted - len(waiting),
            max_groups=free - len(groups),
        )
        groups += waiting[:room]
        for _ in range(room - min(room, len(waiting))):
            groups.append(self.ledger.issue(0, position=self.ledger.num_issued + 1))
        for group in groups:
            self.ledger.lease(group, worker, version=served, now=0.0)
            attempt, versions = self.queue.progress.get(group.sequence, (0, []))
            resumed = versions if attempt >= group.first_attempt else []
            if (earlier := self.started_groups.get(group.sequence)) is not None:
                self.forgotten.append((group.sequence, earlier))
            self.started_groups[group.sequence] = StartedGroup(group.attempt, worker, list(resumed))
        if decodes:
            self.decode()

    @rule()
    def decode(self):
        for held_group in self.started_groups.values():
            held_group.versions.append(self.published + self.offset)

    @rule(index=st.integers(0, 99))
    def cache_progress(self, index):
        """Stores the progress of a group, possibly late and from an attempt that was replaced."""
        candidates = [*self.started_groups.items(), *self.forgotten]
        if candidates:
            sequence, held_group = candidates[index % len(candidates)]
            self.queue.progress[sequence] = (held_group.attempt, list(held_group.versions))

    @precondition(lambda self: not self.is_queue_lost)
    @rule(index=st.integers(0, 99))
    def end_segment(self, index):
        group = self.chosen(index, *RUNNING)
        if (
            group is not None
            and (held_group := self.started_groups.get(group.sequence)) is not None
        ):
            self.queue.progress[group.sequence] = (held_group.attempt, list(held_group.versions))
            del self.started_groups[group.sequence]
            self.ledger.interrupt(group)

    @precondition(lambda self: not self.is_queue_lost)
    @rule(index=st.integers(0, 99), count=st.integers(1, PLACES))
    def finish(self, index, count):
        for _ in range(count):
            group = self.chosen(index, *RUNNING)
            held_group = None if group is None else self.started_groups.pop(group.sequence, None)
            if held_group is None:
                return
            versions = held_group.versions or [self.published + self.offset]
            self.queue.samples[group.sequence] = (held_group.attempt, versions)
            self.ledger.complete(group, oldest_version=min(versions))

    @rule(index=st.integers(0, 99))
    def fail(self, index):
        """Fails a reward; the group's stored progress remains, as if the rollout had no time to delete it."""
        group = self.chosen(index, *RUNNING)
        if group is not None:
            if (held_group := self.started_groups.pop(group.sequence, None)) is not None:
                self.forgotten.append((group.sequence, held_group))
            self.ledger.retry(group, "reward_error")

    @precondition(lambda self: not self.is_queue_lost)
    @rule(publishes=st.booleans())
    def train(self, publishes):
        choice = choose_batch(
            self.ledger.in_state(GroupState.READY),
            self.ledger.started_groups(),
            gate=self.gate,
            trainer_version=self.version,
            wait_for_due=True,
            keep_stale=True,
        )
        # The batch waits without a time limit, so every finished group is within the bound.
        assert not choice.stale, "a finished group grew stale although every batch waits"
        if not choice.batch:
            return
        for group in choice.batch:
            _, versions = self.queue.samples.pop(group.sequence)
            assert self.version - min(versions) <= self.gate.max_staleness
        self.ledger.train(choice.batch)
        self.ledger.consume(choice.batch)
        self.step += 1
        if publishes:
            self.publish()

    @rule()
    def publish(self):
        self.published = self.step

    # Deaths of services.

    @rule(worker=st.sampled_from(WORKERS))
    def kill_rollout(self, worker):
        self.started_groups = {
            key: held_group
            for key, held_group in self.started_groups.items()
            if held_group.worker != worker
        }
        for group in self.ledger.running():
            if group.worker_id == worker:
                self.ledger.park_lost(group)

    @rule()
    def checkpoint(self):
        self.snapshot = deepcopy(self.queue)

    @rule(has_snapshot=st.booleans())
    def kill_queue(self, has_snapshot):
        """Restarts the transferqueue empty, or with the newest snapshot, which may hold earlier attempts."""
        self.queue = deepcopy(self.snapshot) if has_snapshot else Queue()
        self.is_queue_lost = True

    @precondition(lambda self: self.is_queue_lost)
    @rule()
    def recover(self):
        """Restores groups as the scheduler does after the loop has detected the loss."""
        self.is_queue_lost = False
        for sequence, (attempt, versions) in [*self.queue.samples.items()]:
            group = self.group(sequence)
            if group is None or group.attempt != attempt or group.state in WAITING:
                del self.queue.samples[sequence]
            elif group.state in RUNNING:
                self.started_groups.pop(sequence, None)
                self.ledger.complete(group, oldest_version=min(versions))
        for group in self.ledger.in_state(GroupState.READY):
            if group.sequence not in self.queue.samples:
                self.ledger.requeue(group)
        for group in self.ledger.running():
            self.ledger.interrupt(group)

    @rule()
    def kill_controller(self):
        facts = [group.facts() for group in self.ledger.in_state(*GroupState)]
        counts = self.ledger.counts()
        self.ledger = Ledger.restore(
            LedgerState(
                groups=tuple(
                    Group(**{**stored_group._asdict(), "state": GroupState(stored_group.state)})
                    for stored_group in facts
                ),
                num_issued=self.ledger.num_issued,
                position=self.ledger.position,
                ended={
                    state: counts[state]
                    for state in (GroupState.CONSUMED, GroupState.DROPPED, GroupState.QUARANTINED)
                },
            ),
            max_attempts=1000,
            now=0.0,
        )

    @invariant()
    def no_running_group_is_older_than_the_ledger_knows(self):
        if not hasattr(self, "ledger"):
            return
        for sequence, held_group in self.started_groups.items():
            group = self.group(sequence)
            if group is not None and group.state in RUNNING and group.attempt == held_group.attempt:
                assert (
                    min(held_group.versions, default=group.oldest_version) >= group.oldest_version
                )


Run.TestCase.settings = settings(stateful_step_count=60)
test_the_bound_holds_through_any_sequence_of_kills = Run.TestCase
