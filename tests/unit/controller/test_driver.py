"""Which ends of workers end their run."""

import asyncio

import pytest

from services.common.clock import SystemClock
from services.controller.launch.launcher import ExternalLauncher, WorkerExit
from services.controller.membership import Membership
from services.controller.run.driver import RunDriver, Services
from services.controller.run.run_state import RunState
from tests.unit.controller.test_resize import RUN, spec_of, worker


async def driver_in(state: RunState, *, loaded: int) -> RunDriver:
    """A driver of a run of two rollouts."""
    membership = Membership(SystemClock(), 30.0)
    membership.open_run(RUN)
    for index in range(loaded):
        await membership.register(worker(index))
    services = Services(
        membership=membership,
        launcher=ExternalLauncher(),
        queue=None,
        clock=SystemClock(),
        heartbeat_timeout_s=30.0,
    )
    return RunDriver(RUN, spec_of(2), services, journal=None, state=state, move=None)


@pytest.mark.parametrize(
    ("state", "loaded", "code", "ends_the_run"),
    [
        (RunState.STARTING, 1, 1, True),
        (RunState.RUNNING, 0, 1, True),
        (RunState.RUNNING, 1, 1, False),
        (RunState.STARTING, 1, -9, False),
    ],
    ids=["at the start", "nobody is left", "others go on", "killed"],
)
async def test_a_rollout_that_cannot_load_ends_a_run_that_cannot_go_on(
    state, loaded, code, ends_the_run
):
    driver = await driver_in(state, loaded=loaded)
    driver.worker_exited(
        WorkerExit(run_id=RUN, worker_id="rollout-1", code=code, last_lines="no memory")
    )
    assert driver._is_hopeless is ends_the_run


@pytest.mark.parametrize(("state", "is_heard"), [("draining", True), ("loaded", False)])
async def test_the_end_of_a_rollout_that_stores_its_work_is_waited_for(
    monkeypatch, state, is_heard
):
    monkeypatch.setattr("services.controller.run.driver._EXIT_REPORT_S", 0.0)
    driver = await driver_in(RunState.RUNNING, loaded=2)
    driver._services.membership.find(RUN, "rollout-1").state = state
    waiting = asyncio.ensure_future(driver._await_exit_report())
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() is not is_heard
    driver.worker_exited(WorkerExit(run_id=RUN, worker_id="rollout-1", code=0, last_lines=""))
    await waiting
