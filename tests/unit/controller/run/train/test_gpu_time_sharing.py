"""Tests of GPU time sharing between trainer and rollouts: the order of sleeping, waking and waiting."""

import asyncio
from types import SimpleNamespace

import pytest

from services.common.errors import UnavailableError
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing


class Side:
    """Fake trainer or rollout pool that records calls."""

    def __init__(self, name, log):
        self.name, self.log, self.is_lost = name, log, False

    async def park_for_others(self):
        self.log.append(f"{self.name} put aside")

    async def sleep(self, *, timeout_s):
        await self._do("sleeps", timeout_s)

    async def wake(self, *, timeout_s):
        await self._do("wakes", timeout_s)

    async def _do(self, what, timeout_s):
        assert timeout_s == 7
        await asyncio.sleep(0)
        if self.is_lost:
            raise UnavailableError(f"{self.name} is gone")
        self.log.append(f"{self.name} {what}")


class Weights:
    """Fake weight session that records calls."""

    def __init__(self, log):
        self.log, self.pin = log, asyncio.Lock()

    async def publish(self, newest):
        self.log.append(f"publish {newest()}")

    async def replace(self, newest, *, on_copied):
        assert self.pin.locked()
        self.log.append(f"copy {newest()}")
        await on_copied()
        await on_copied()  # the session calls it again if it repeats a transfer
        self.log.append("adopt")


class Run:
    def __init__(self, *, is_colocated=True, partial=False):
        self.log = []
        self.trainer, self.rollout_pool = Side("trainer", self.log), Side("rollouts", self.log)
        self.weights = Weights(self.log)
        spec = SimpleNamespace(
            topology=SimpleNamespace(is_colocated=is_colocated),
            rollout=SimpleNamespace(partial_rollout=partial),
            limits=SimpleNamespace(step_timeout_s=7),
        )
        self.gpu_time_sharing = GpuTimeSharing(
            spec=SimpleNamespace(now=spec),
            connections=self,
            evaluator=SimpleNamespace(wait_leased=self._leased),
        )

    async def _leased(self):
        """Returns at once, because no evaluation uses the rollouts."""


async def test_each_side_sleeps_before_the_other_one_wakes():
    run = Run()
    for version in (1, 2):
        await run.gpu_time_sharing.begin_training()
        await run.gpu_time_sharing.begin_training()
        await run.gpu_time_sharing.publish(lambda version=version: version)
        assert run.log == [
            *("rollouts sleeps", "trainer wakes", f"copy {version}"),
            *("trainer sleeps", "rollouts wakes", "adopt"),
        ]
        run.log.clear()


async def test_responses_that_can_continue_elsewhere_are_parked_before_engines_sleep():
    run = Run(partial=True)
    await run.gpu_time_sharing.begin_training()
    assert run.log == ["rollouts put aside", "rollouts sleeps", "trainer wakes"]


async def test_initial_weights_are_copied_in_the_trainers_turn():
    run = Run()
    await run.gpu_time_sharing.publish(lambda: 0)
    assert run.log[:3] == ["rollouts sleeps", "trainer wakes", "copy 0"]


async def test_an_evaluation_ends_before_the_trainers_turn_and_the_next_waits_for_new_weights():
    run = Run()
    await run.weights.pin.acquire()
    begins = asyncio.create_task(run.gpu_time_sharing.begin_training())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not begins.done()
    assert run.log == []
    run.weights.pin.release()
    await begins
    assert run.weights.pin.locked()
    await run.gpu_time_sharing.publish(lambda: 1)
    assert not run.weights.pin.locked()


async def test_a_side_that_is_lost_ends_the_shift():
    run = Run()
    run.rollout_pool.is_lost = True
    with pytest.raises(UnavailableError, match="rollouts is gone"):
        await run.gpu_time_sharing.begin_training()
    assert run.log == []


async def test_seconds_of_gpu_switches_are_taken_once():
    run = Run()
    await run.gpu_time_sharing.publish(lambda: 1)
    seconds = run.gpu_time_sharing.take_seconds()
    connections = {"rollouts_sleep_s", "trainer_wake_s", "trainer_sleep_s", "rollouts_wake_s"}
    assert seconds.keys() == connections | {"gpu_switch_s"}
    assert seconds["gpu_switch_s"] == pytest.approx(
        sum(seconds[connection] for connection in connections)
    )
    assert run.gpu_time_sharing.take_seconds() == {}


async def test_sides_with_gpus_of_their_own_never_sleep():
    run = Run(is_colocated=False)
    await run.gpu_time_sharing.begin_training()
    await run.gpu_time_sharing.publish(lambda: 1)
    assert run.log == ["publish 1"]
    assert run.gpu_time_sharing.take_seconds() == {}
