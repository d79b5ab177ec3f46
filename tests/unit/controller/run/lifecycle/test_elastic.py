"""Tests that new rollouts join a run after they have loaded, and that a run keeps its size if they fail."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from services.common.errors import FailedPreconditionError
from services.common.runspec.workers import rows_gauge
from services.controller.launch.launcher import WorkerExit
from services.controller.membership import Membership, Worker
from services.controller.run.lifecycle.elastic import ElasticSizing, SizeChangedError
from services.controller.run.state.requests import CurrentSpec
from services.controller.store.rows import Request
from tests.helpers.specs import spec_with

RUN = "run_1"


def spec_of(replicas: int):
    return spec_with(rollout={"replicas": replicas}, trainer={"prompts_per_step": 1})


def worker(index: int) -> Worker:
    """Returns a rollout that has loaded."""
    return Worker(
        run_id=RUN,
        worker_id=f"rollout-{index}",
        incarnation="i",
        role="rollout",
        address="a:1",
        host_id="h",
        last_heartbeat=0.0,
        state="loaded",
        gauges={rows_gauge("train"): 8.0},
    )


@dataclass
class FakeLauncher:
    refuses: bool = False
    started: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    """Rollouts that a queue holds back."""

    def queued(self, run_id):
        return self.waiting

    async def admitted(self, run_id, worker_ids):
        while worker_ids <= self.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return worker_ids - self.waiting

    async def start(self, run_id, spec):
        if self.refuses and spec.rollout.replicas > 1:
            raise FailedPreconditionError("no room")
        self.started.append(spec.rollout.replicas)

    async def end(self, run_id, worker_id):
        self.ended.append(worker_id)

    async def release(self, run_id, worker_ids):
        self.released += sorted(worker_ids)


@dataclass
class FakeJournal:
    kinds: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Rollouts that the newest event reports as absent."""

    async def record_event(self, note, *, also):
        self.kinds.append(note.type)
        self.absent = note.data.get("absent", [])


@dataclass
class FakeRun:
    """Fake pipeline that sends weights to joining rollouts and detaches leaving ones."""

    reaches: bool = True
    has_other_data: bool = False
    joined: list[str] = field(default_factory=list)
    detached: list[str] = field(default_factory=list)
    may_serve: asyncio.Event = field(default_factory=asyncio.Event)
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.may_leave.set()

    async def admit(self, rollouts):
        if self.has_other_data:
            raise FailedPreconditionError("other data")
        self.joined += [rollout.worker_id for rollout in rollouts]
        return self.reaches

    async def wait_all_serve(self):
        await self.may_serve.wait()

    async def detach(self, names):
        self.detached += sorted(names)
        await self.may_leave.wait()

    @property
    def publisher(self):
        return self


@dataclass
class FakeMailbox:
    """Fake request queue with at most one request, for another size."""

    request: Request | None = None

    def get(self, kind):
        return self.request

    def done(self, request):
        return None

    def added(self, kind, **options):
        self.request = Request(kind=kind, request_id="later", options=options)


class Case:
    """Run that is requested to change its number of rollouts."""

    def __init__(
        self, *, replicas: int = 1, refuses: bool = False, request: Request | None = None, **run
    ) -> None:
        self.launcher, self.journal = FakeLauncher(refuses), FakeJournal()
        self.run = FakeRun(**run)
        self.entered = asyncio.get_running_loop().create_future()
        self.membership = Membership(time, 30.0)
        self.membership.open_run(RUN)
        self.spec = CurrentSpec(spec_of(replicas))
        self.resizing = ElasticSizing(
            RUN,
            self.spec,
            launcher=self.launcher,
            membership=self.membership,
            journal=self.journal,
            request_queue=FakeMailbox(request),
        )
        self.detached: list[str] = []
        self.resizing.on_left = self._record_detached

    async def _record_detached(self, names) -> None:
        self.detached += sorted(names)

    async def register(self, index: int) -> None:
        await self.membership.register(worker(index))

    def ask(self, replicas: int) -> None:
        self.spec.now = spec_of(replicas)
        self.resizing.notify()

    def enter(self) -> None:
        """Enters the training loop."""
        self.entered.set_result(self.run)

    async def watch(self, *present: str) -> None:
        await self.resizing.watch(present or ["rollout-0"], pipeline=self.entered)

    async def wait_for_event(self, kind: str) -> None:
        while kind not in self.journal.kinds:  # noqa: ASYNC110 -- the test polls the journal
            await asyncio.sleep(0)


async def test_new_rollouts_join_after_all_have_loaded_and_the_loop_continues():
    case = Case()
    await case.register(0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(3)
        await case.register(1)
        await asyncio.sleep(0)
        assert not case.run.joined
        await case.register(2)
        case.enter()
        while not case.run.joined:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not case.journal.kinds
        case.run.may_serve.set()
        await case.wait_for_event("Resized")
        assert not watching.done()
        watching.cancel()
    assert case.run.joined == ["rollout-1", "rollout-2"]
    assert case.launcher.started == [3]


async def test_the_end_of_a_rollout_that_has_joined_is_that_of_any_other():
    case = Case()
    await case.register(0)
    await case.register(1)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        while not case.run.joined:  # noqa: ASYNC110
            await asyncio.sleep(0)
        worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-1", code=1, last_lines="no GPU")
        assert not case.resizing.handles_exit(worker_exit)
        watching.cancel()


async def test_the_loop_is_left_if_weights_do_not_reach_new_rollouts_as_they_travel_now():
    case = Case(reaches=False)
    await case.register(0)
    await case.register(1)
    case.enter()
    case.ask(2)
    async with asyncio.timeout(30):
        with pytest.raises(SizeChangedError):
            await case.watch()
    assert await case.resizing.remove_surplus() == {}
    assert case.journal.kinds == ["Resized"]


async def test_new_rollouts_with_other_data_are_ended_and_the_run_keeps_its_size():
    case = Case(has_other_data=True)
    await case.register(0)
    await case.register(1)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        await case.wait_for_event("ResizeFailed")
        while case.launcher.started != [2, 1]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        watching.cancel()
    assert case.launcher.ended == ["rollout-1"]
    assert case.spec.now.rollout.replicas == 1
    assert case.journal.kinds == ["ResizeFailed"]


async def test_rollouts_are_removed_while_the_loop_runs():
    case = Case()
    case.run.may_serve.set()
    case.enter()
    for index in range(3):
        await case.register(index)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(3)
        await case.wait_for_event("Resized")
        case.journal.kinds.clear()
        case.ask(1)
        await case.wait_for_event("Resized")
        watching.cancel()
    assert case.run.detached == case.launcher.ended == ["rollout-1", "rollout-2"]
    assert [worker.worker_id for worker in case.membership.workers(RUN)] == ["rollout-0"]
    assert case.launcher.started == [3, 1]


async def test_the_loop_is_left_if_one_that_it_waits_for_is_not_wanted_any_more():
    case = Case()
    case.ask(1)
    async with asyncio.timeout(30):
        with pytest.raises(SizeChangedError):
            await case.watch("rollout-0", "rollout-1")


async def test_new_rollouts_are_not_waited_for_once_they_are_not_wanted_any_more():
    case = Case()
    await case.register(0)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(3)
        while not case.launcher.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await case.register(1)
        case.ask(2)
        case.run.may_serve.set()
        await case.wait_for_event("Resized")
        watching.cancel()
    assert (case.run.joined, case.run.detached) == (["rollout-1"], [])
    assert case.launcher.ended == ["rollout-2"]


async def test_a_withdrawn_size_is_reported():
    case = Case()
    await case.register(0)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        while not case.launcher.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        case.resizing._request_queue.request = Request(
            kind="resize", request_id="r", options={"has": 1}
        )
        case.ask(1)
        await case.wait_for_event("Resized")
        watching.cancel()
    assert (case.launcher.ended, case.run.joined) == (["rollout-1"], [])


async def test_rollouts_that_were_about_to_leave_when_the_loop_was_left_are_ended():
    case = Case(replicas=2)
    await case.register(0)
    await case.register(1)
    case.enter()
    case.run.may_leave.clear()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch("rollout-0", "rollout-1"))
        case.ask(1)
        while not case.run.detached:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watching.cancel()  # the loss of another worker ends the loop
    assert not case.launcher.ended
    assert case.resizing.present() == {"rollout-0"}
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        await case.wait_for_event("Resized")
        watching.cancel()
    assert case.launcher.ended == ["rollout-1"]


async def test_a_rollout_that_ends_while_it_leaves_is_no_loss():
    case = Case()
    worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-1", code=-9, last_lines="")
    assert case.resizing.handles_exit(worker_exit)


async def test_new_rollouts_that_an_earlier_controller_was_asked_for_are_not_waited_for():
    case = Case(request=Request(kind="resize", request_id="req", options={"has": 1}))
    case.spec.now = spec_of(2)
    case.resizing.resume_request()
    assert case.resizing.present() == {"rollout-0"}
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        while not case.launcher.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-1", code=1, last_lines="no GPU")
        assert case.resizing.handles_exit(worker_exit)
        await case.wait_for_event("ResizeFailed")
        watching.cancel()
    assert case.spec.now.rollout.replicas == 1


async def test_rollouts_that_were_to_leave_under_an_earlier_controller_are_ended():
    case = Case(request=Request(kind="resize", request_id="req", options={"has": 3}))
    case.resizing.resume_request()
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        await case.wait_for_event("Resized")
        watching.cancel()
    assert case.launcher.ended == ["rollout-1", "rollout-2"]


async def test_the_others_continue_while_a_lost_rollout_is_replaced():
    case = Case(replicas=2)
    await case.register(0)
    assert case.resizing.missing_rollouts() == {"rollout-1"}
    case.enter()
    case.run.may_serve.set()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        assert case.resizing.present() == {"rollout-0"}
        watching = tasks.create_task(case.watch())
        await asyncio.sleep(0)
        await case.register(1)
        await case.wait_for_event("Replaced")
        watching.cancel()
    assert case.run.joined == ["rollout-1"]


async def test_a_run_whose_rollouts_are_all_gone_waits_for_them():
    assert Case().resizing.missing_rollouts() == set()


async def test_rollouts_join_when_their_queue_admits_them():
    case = Case(request=Request(kind="resize", request_id="req", options={"has": 1}))
    case.launcher.waiting = {"rollout-1", "rollout-2"}
    case.enter()
    case.run.may_serve.set()
    for index in range(3):
        await case.register(index)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(3)
        await asyncio.sleep(0.01)
        assert not case.run.joined
        case.launcher.waiting = {"rollout-2"}
        await case.wait_for_event("Resized")
        assert (case.run.joined, case.journal.absent) == (["rollout-1"], ["rollout-2"])
        assert case.resizing.size == 2
        assert case.resizing._request_queue.request.options == {"has": 2}
        case.journal.kinds.clear()
        case.launcher.waiting = set()
        await case.wait_for_event("Resized")
        watching.cancel()
    assert (case.run.joined, case.journal.absent) == (["rollout-1", "rollout-2"], [])


async def test_a_run_is_resized_while_rollouts_wait_in_a_queue():
    case = Case(replicas=2)
    case.launcher.waiting = {"rollout-2"}
    case.enter()
    for index in range(2):
        await case.register(index)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch("rollout-0", "rollout-1"))
        case.ask(3)
        while case.launcher.started != [3]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        case.ask(1)
        while case.launcher.ended != ["rollout-1", "rollout-2"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watching.cancel()
    assert case.run.detached == ["rollout-1"]
    assert case.resizing.size == 1


async def test_the_loop_is_entered_without_rollouts_that_wait_in_a_queue():
    case = Case(replicas=3)
    case.launcher.waiting = {"rollout-1"}
    assert case.resizing.present() == {"rollout-0", "rollout-2"}, "even if none has loaded yet"


async def test_a_rollout_that_ended_while_the_loop_was_left_is_not_taken_for_loaded():
    case = Case(request=Request(kind="resize", request_id="req", options={"has": 1}))
    case.spec.now = spec_of(2)
    case.resizing.resume_request()
    case.launcher.waiting = {"rollout-1"}
    case.enter()
    await case.register(1)
    worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-1", code=-9, last_lines="")
    assert case.resizing.handles_exit(worker_exit)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        while not case.launcher.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert case.membership.workers(RUN) == []
        watching.cancel()
    assert case.journal.kinds == []


async def test_rollouts_that_wait_in_a_queue_are_still_new_when_the_loop_is_left():
    case = Case()
    case.launcher.waiting = {"rollout-2"}
    await case.register(0)
    await case.register(1)
    case.spec.now = spec_of(3)
    assert await case.resizing.remove_surplus() == {}
    assert (case.resizing.size, case.journal.absent) == (2, ["rollout-2"])


async def test_rollouts_that_are_too_many_are_ended():
    case = Case()
    for index in range(3):
        await case.register(index)
    assert set(await case.resizing.remove_surplus()) == {"rollout-1", "rollout-2"}
    assert case.launcher.ended == ["rollout-1", "rollout-2"]
    assert [worker.worker_id for worker in case.membership.workers(RUN)] == ["rollout-0"]


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_run_keeps_its_size_when_new_rollouts_do_not_come_up(refuses):
    case = Case(refuses=refuses)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        while not refuses and not case.launcher.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-1", code=1, last_lines="no GPU")
        assert refuses or case.resizing.handles_exit(worker_exit)
        while not case.launcher.ended:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watching.cancel()
    assert case.spec.now.rollout.replicas == 1
    assert case.journal.kinds == ["ResizeFailed"]
    assert case.launcher.ended == ["rollout-1"]


async def test_the_end_of_a_rollout_that_the_run_needs_is_not_taken():
    worker_exit = WorkerExit(run_id=RUN, worker_id="rollout-0", code=1, last_lines="")
    assert not Case().resizing.handles_exit(worker_exit)


async def test_rollouts_leave_a_drained_host_while_others_generate_and_are_replaced():
    case, departures = Case(replicas=2), []

    async def on_left(names):
        departures.extend(sorted(names))
        assert case.launcher.released == case.run.detached == ["rollout-1"], (
            "first detached, then ended"
        )

    case.resizing.on_left = on_left
    for index in (0, 1):
        await case.register(index)
    case.entered.set_result(case.run)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch("rollout-0", "rollout-1"))
        await asyncio.sleep(0)
        case.resizing.move(["rollout-1"])
        async with asyncio.timeout(5):
            while not case.launcher.started:  # noqa: ASYNC110 -- the fake launcher is polled
                await asyncio.sleep(0)
        assert (departures, case.run.joined) == (["rollout-1"], [])
        case.run.may_serve.set()
        replacement = worker(1)
        replacement.incarnation = "another"
        await case.membership.register(replacement)
        async with asyncio.timeout(5):
            while case.journal.kinds != ["Replaced"]:  # noqa: ASYNC110 -- the fake journal is polled
                await asyncio.sleep(0)
        assert case.run.joined == ["rollout-1"]
        watching.cancel()


async def test_a_rollout_that_is_removed_meanwhile_has_left_its_drained_host():
    case = Case(replicas=2)
    for index in (0, 1):
        await case.register(index)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        case.resizing.move(["rollout-1"])
        case.ask(1)
        watching = tasks.create_task(case.watch("rollout-0", "rollout-1"))
        await case.wait_for_event("Resized")
        watching.cancel()
    assert case.detached == ["rollout-1"]


async def test_rollouts_of_a_host_that_is_in_service_again_stay():
    case = Case(replicas=2)
    for index in (0, 1):
        await case.register(index)
    case.entered.set_result(case.run)
    case.resizing.move(["rollout-1"])
    case.resizing.stay(["rollout-1"])
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch("rollout-0", "rollout-1"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (case.run.detached, case.launcher.released) == ([], [])
        watching.cancel()
