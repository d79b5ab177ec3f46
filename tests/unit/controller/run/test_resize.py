"""New rollouts are taken in once they have loaded; a run keeps its size when they do not come up."""

import asyncio
from dataclasses import dataclass, field

import pytest

from services.common.clock import SystemClock
from services.common.errors import FailedPreconditionError
from services.common.spec.loader import parse_spec
from services.controller.launch.launcher import WorkerExit
from services.controller.membership.registry import Membership, Worker
from services.controller.run.requests import CurrentSpec
from services.controller.run.resize import ResizedError, Resizing

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


class EmptyMailbox:
    """Nobody asks for anything."""

    def get(self, kind):
        return None

    def done(self, request):
        return None


class Case:
    """A run of one rollout that is asked for another size."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.launcher, self.journal = FakeLauncher(refuses), FakeJournal()
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

    async def watch(self) -> None:
        await self.resizing.watch(spec_of(1))


async def test_the_loop_is_left_once_the_new_rollouts_have_loaded():
    case = Case()
    await case.register(0)
    with pytest.raises(ExceptionGroup) as error:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(case.watch())
            case.ask(3)
            await case.register(1)
            await asyncio.sleep(0)
            assert not watching.done()
            await case.register(2)
            await asyncio.sleep(5)
    assert error.group_contains(ResizedError)
    assert case.launcher.started == [3]
    assert await case.resizing.settle() == {}


async def test_a_lost_rollout_is_waited_for_while_the_others_go_on():
    case = Case()
    case.spec.now = spec_of(2)
    await case.register(0)
    assert case.resizing.absent() == {"rollout-1"}
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as error:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(case.resizing.watch(case.spec.now, absent={"rollout-1"}))
                await asyncio.sleep(0)
                await case.register(1)
    assert error.group_contains(ResizedError)
    assert await case.resizing.settle() == {}
    assert case.journal.kinds == ["Replaced"]


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


def test_the_end_of_a_rollout_that_the_run_needs_is_not_taken():
    ended = WorkerExit(run_id=RUN, worker_id="rollout-0", code=1, last_lines="")
    assert not Case().resizing.takes_exit(ended)
