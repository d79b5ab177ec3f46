"""Tests of early accumulation: the trainer gets finished groups before the step, each once and never all."""

import asyncio
from types import SimpleNamespace

from services.controller.rules.ledger import Ledger
from services.controller.rules.staleness import StalenessGate
from services.controller.run.observe.waits import Waits
from services.controller.run.train.train_step import EarlyTraining


class Generation:
    """Fake scheduler whose groups finish when the test calls ``finish``."""

    def __init__(self, ledger):
        self.gate = StalenessGate(max_staleness=0, groups_per_step=4)
        self.sample_index = SimpleNamespace(
            meta=lambda groups: [group.sequence for group in groups]
        )
        self._ledger = ledger
        self._changed = asyncio.Condition()

    async def wait_until(self, condition):
        async with self._changed:
            await self._changed.wait_for(condition)

    async def finish(self, *groups, version=0):
        for group in groups:
            self._ledger.lease(group, "rollout-0", version=version, now=0.0)
            self._ledger.complete(group, oldest_version=version)
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(0.01)


class Trainer:
    def __init__(self):
        self.sent = []
        self.free = asyncio.Event()
        self.free.set()

    async def accumulate(self, step, groups, *, weight_version, timeout_s):
        self.sent.append((step, weight_version, groups))
        await self.free.wait()


async def test_each_group_is_sent_once_and_waiting_groups_together():
    ledger, trainer, waits = Ledger(3), Trainer(), Waits()
    groups = [ledger.issue(row, position=row) for row in range(4)]
    scheduler = Generation(ledger)
    early = EarlyTraining(trainer=trainer, ledger=ledger, scheduler=scheduler, waits=waits)
    task = asyncio.create_task(early.accumulate(3, weight_version=5, timeout_s=1.0))
    trainer.free.clear()
    await scheduler.finish(groups[2], version=5)
    await scheduler.finish(groups[0], version=5)
    await scheduler.finish(groups[3], version=4)  # too old: the step decides whether it trains
    trainer.free.set()
    await asyncio.sleep(0.01)
    assert trainer.sent == [(3, 5, [2]), (3, 5, [0])]
    ledger.requeue(groups[0])  # the group's samples were lost
    await scheduler.finish(groups[0], version=5)
    assert trainer.sent[2:] == [(3, 5, [0])], "another attempt is another group"
    await scheduler.finish(groups[1], version=5)
    assert len(trainer.sent) == 3, "the last ones go with the step"
    task.cancel()
    waits.seconds["no_data"] = 10.0
    assert 9.0 < waits.for_data() < 10.0, "the trainer was not idle all the time"


async def test_what_is_trained_early_counts_as_no_time_without_work():
    waits = Waits()
    waits.seconds["no_data"] = 1.0
    waits.add_work(2.0)
    assert waits.for_data() == 0.0
    waits.pop()
    waits.seconds["no_data"] = 1.0
    assert waits.for_data() == 1.0
