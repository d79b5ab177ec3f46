"""New rollouts are taken in once they have loaded; a run keeps its size when they do not come up."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from services.common.clock import SystemClock
from services.common.errors import FailedPreconditionError
from services.common.spec.loader import parse_spec
from services.controller.launch.launcher import WorkerExit
from services.controller.membership.registry import Membership, Worker
from services.controller.run.requests import CurrentSpec
from services.controller.run.resize import ResizedError, Resizing
from services.rollout.client import rows_gauge

RUN = "run_1"


def spec_of(replicas: int):
    return parse_spec(
        {
            "name": "demo",
            "model": {"path": "tiny:qwen2-0.4m"},
            "data": {"train": {"source": "jsonl", "path": "x.jsonl"}},
            "rollout": {"replicas": replicas, "rewards": [{"name": "exact_match"}]},
            "trainer": {"steps": 1, "prompts_per_step": 1},
        }
    )


def worker(index: int) -> Worker:
    """A rollout that has loaded."""
    return Worker(
        run_id=RUN,
        worker_id=f"rollout-{index}",
        incarnation="i",
        role="rollout",
        address="a:1",
        host_id="h",
        last_heard=0.0,
        state="loaded",
        gauges={rows_gauge("train"): 8.0},
    )


@dataclass
class FakeLauncher:
    refuses: bool = False
    started: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def start(self, run_id, spec):
        if self.refuses:
            raise FailedPreconditionError("no room")
        self.started.append(spec.rollout.replicas)

    async def end(self, run_id, worker_id):
        self.ended.append(worker_id)


@dataclass
class FakeJournal:
    kinds: list[str] = field(default_factory=list)

    async def note(self, note, *, also):
        self.kinds.append(note.type)


@dataclass
class FakePublishing:
    """Brings weights to whoever joins."""

    reaches: bool = True
    refuses: bool = False
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    may_serve: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, rollouts):
        if self.refuses:
            raise FailedPreconditionError("other data")
        self.joined += [rollout.worker_id for rollout in rollouts]
        return self.reaches

    async def all_serve(self):
        await self.may_serve.wait()

    async def hand_over(self, names):
        self.left += names


class EmptyMailbox:
    """Nobody asks for anything."""

    def get(self, kind):
        return None

    def done(self, request):
        return None


class Case:
    """A run of one rollout that is asked for another size."""

    def __init__(self, *, refuses: bool = False, **publishing) -> None:
        self.launcher, self.journal = FakeLauncher(refuses), FakeJournal()
        self.publishing = FakePublishing(**publishing)
        self.entered = asyncio.get_running_loop().create_future()
        self.membership = Membership(SystemClock(), 30.0)
        self.membership.open_run(RUN)
        self.spec = CurrentSpec(spec_of(1))
        self.resizing = Resizing(
            RUN,
            self.spec,
            launcher=self.launcher,
            membership=self.membership,
            journal=self.journal,
            mailbox=EmptyMailbox(),
        )

    async def register(self, index: int) -> None:
        await self.membership.register(worker(index))

    def ask(self, replicas: int) -> None:
        self.spec.now = spec_of(replicas)
        self.resizing.ask()

    def enter(self) -> None:
        """The loop is entered."""
        live = SimpleNamespace(publishing=self.publishing, generation=self.publishing)
        self.entered.set_result(live)

    async def watch(self, replicas: int = 1, **absent) -> None:
        await self.resizing.watch(spec_of(replicas), live=self.entered, **absent)

    async def told(self, kind: str) -> None:
        while kind not in self.journal.kinds:  # noqa: ASYNC110 -- a test of events that are written
            await asyncio.sleep(0)


async def test_new_rollouts_join_once_all_have_loaded_and_the_loop_goes_on():
    case = Case()
    await case.register(0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(3)
        await case.register(1)
        await asyncio.sleep(0)
        assert not case.publishing.joined
        await case.register(2)
        case.enter()
        while not case.publishing.joined:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not case.journal.kinds
        case.publishing.may_serve.set()
        await case.told("Resized")
        assert not watching.done()
        watching.cancel()
    assert case.publishing.joined == ["rollout-1", "rollout-2"]
    assert case.launcher.started == [3]


async def test_the_end_of_a_rollout_that_has_joined_is_that_of_any_other():
    case = Case()
    await case.register(0)
    await case.register(1)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        while not case.publishing.joined:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ended = WorkerExit(run_id=RUN, worker_id="rollout-1", code=1, last_lines="no GPU")
        assert not case.resizing.takes_exit(ended)
        watching.cancel()


async def test_the_loop_is_left_if_weights_do_not_reach_new_rollouts_as_they_travel_now():
    case = Case(reaches=False)
    await case.register(0)
    await case.register(1)
    case.enter()
    case.ask(2)
    async with asyncio.timeout(30):
        with pytest.raises(ResizedError):
            await case.watch()
    assert await case.resizing.settle() == {}
    assert case.journal.kinds == ["Resized"]


async def test_new_rollouts_with_other_data_are_ended_and_the_run_keeps_its_size():
    case = Case(refuses=True)
    await case.register(0)
    await case.register(1)
    case.enter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch())
        case.ask(2)
        await case.told("ResizeFailed")
        while case.spec.now.rollout.replicas != 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watching.cancel()
    assert case.launcher.ended == ["rollout-1"]


async def test_the_loop_is_left_for_fewer_rollouts_also_after_others_have_joined():
    case = Case()
    case.publishing.may_serve.set()
    case.enter()
    for index in range(2):
        await case.register(index)
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as error:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(case.watch())
                case.ask(2)
                await case.told("Resized")
                case.ask(1)
    assert error.group_contains(ResizedError)
    assert case.publishing.left == ["rollout-1"]
    assert set(await case.resizing.settle()) == {"rollout-1"}


async def test_a_lost_rollout_is_waited_for_while_the_others_go_on():
    case = Case()
    case.spec.now = spec_of(2)
    await case.register(0)
    assert case.resizing.absent() == {"rollout-1"}
    case.enter()
    case.publishing.may_serve.set()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(case.watch(2, absent={"rollout-1"}))
        await asyncio.sleep(0)
        await case.register(1)
        await case.told("Replaced")
        watching.cancel()
    assert case.publishing.joined == ["rollout-1"]


async def test_a_run_whose_rollouts_are_all_gone_waits_for_them():
    assert Case().resizing.absent() == set()


async def test_rollouts_that_are_too_many_are_ended():
    case = Case()
    for index in range(3):
        await case.register(index)
    assert set(await case.resizing.settle()) == {"rollout-1", "rollout-2"}
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
        ended = WorkerExit(run_id=RUN, worker_id="rollout-1", code=1, last_lines="no GPU")
        assert case.resizing.takes_exit(ended) is not refuses
        while case.spec.now.rollout.replicas != 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watching.cancel()
    assert case.journal.kinds == ["ResizeFailed"]
    assert case.launcher.ended == ["rollout-1"]


async def test_the_end_of_a_rollout_that_the_run_needs_is_not_taken():
    ended = WorkerExit(run_id=RUN, worker_id="rollout-0", code=1, last_lines="")
    assert not Case().resizing.takes_exit(ended)
