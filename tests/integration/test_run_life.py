"""A training run is held, resumed, forked and ended with care, as a user does it."""

import asyncio
import json

import pytest

from services.cli import known_tokens
from services.cli.api import Api
from services.common.spec.loader import load_spec
from services.controller.api.operations import (
    CancelRun,
    ForkRun,
    GetTopology,
    ListCheckpoints,
    PauseRun,
    ResumeRun,
)
from tests.helpers.cli import slipstream, started
from tests.helpers.ledger_check import check_run

pytestmark = pytest.mark.timeout(300)


async def wait_for(api, run_id, condition, *, timeout_s=120.0):
    """The run, once a condition holds of it."""
    async with asyncio.timeout(timeout_s):
        while not condition(run := await api.get(run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return run


def is_in(*states):
    return lambda run: run.state in states


@pytest.fixture
def up(tmp_path):
    state = tmp_path / "runs"
    with started("up", "--port", "0", "--state-directory", state, until="controller at http"):
        yield json.loads((state / "up.json").read_text())["url"], state


async def submit(spec, api, *overrides):
    return (await api.submit(load_spec(spec, overrides).model_dump(mode="json"))).id


async def checkpoints(api, run_id):
    return (await api.call(ListCheckpoints(run_id=run_id))).items


async def test_a_paused_run_loses_nothing_and_goes_on(plumbing, up):
    url, state = up
    async with Api(url, token=known_tokens.find(url)) as api:
        run_id = await submit(plumbing, api, "trainer.steps=200", "rollout.partial_rollout=true")
        await wait_for(api, run_id, lambda run: run.step >= 3)
        assert (await api.call(PauseRun(run_id=run_id))).state == "PAUSING"
        paused = await wait_for(api, run_id, is_in("PAUSED"))
        assert 3 <= paused.step < 200
        assert (await api.call(GetTopology(run_id=run_id))).items == []
        assert [saved.step for saved in await checkpoints(api, run_id)] == [paused.step]
        await api.call(ResumeRun(run_id=run_id))
        ended = await wait_for(api, run_id, is_in("SUCCEEDED", "FAILED"))
        assert ended.state == "SUCCEEDED", ended.message
        kinds = {event.type for event in await api.events(run_id)}
        assert not kinds & {"Rewound", "WorkerLost"}
        assert check_run(state)["trained"] == 800

        changes = {"trainer": {"steps": 203}}
        fork = ForkRun(run_id=run_id, name="longer", overrides=changes)
        longer = (await api.call(fork)).id
        ended = await wait_for(api, longer, is_in("SUCCEEDED", "FAILED"))
        assert (ended.state, ended.step) == ("SUCCEEDED", 203), ended.message
    lines = slipstream("metrics", longer, "reward_mean", "--url", url).out.splitlines()
    assert len(lines) == 203
    assert "step 203 is trained" in slipstream("events", longer, "--url", url).out
    assert "trainer-0" in slipstream("logs", longer, "--tail", "1", "--url", url).out
    assert "longer" in slipstream("list", "--url", url).out


async def test_a_run_is_ended_behind_its_step_with_a_checkpoint(plumbing, up):
    url, _ = up
    async with Api(url, token=known_tokens.find(url)) as api:
        run_id = await submit(plumbing, api, "trainer.steps=100000")
        await wait_for(api, run_id, lambda run: run.step >= 2)
        cancelled = await api.call(CancelRun(run_id=run_id, grace_seconds=60, save_checkpoint=True))
        assert cancelled.state == "CANCELLING"
        ended = await wait_for(api, run_id, is_in("CANCELLED"))
        (saved,) = await checkpoints(api, run_id)
        assert (saved.step, saved.state) == (ended.step, "READY")
