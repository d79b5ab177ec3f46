"""A user pauses, resumes, forks and cancels a training run."""

import asyncio

import pytest

from services.common.runspec.loader import load_spec
from slipstream_client import AsyncClient
from tests.helpers.cli import slipstream
from tests.helpers.ledger_check import check_run

pytestmark = pytest.mark.timeout(300)


async def wait_for(run, condition, *, timeout_s=120.0):
    """Returns the run once it meets a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition(view := await run.refresh()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return view


def is_in(*states):
    return lambda run: run.state in states


async def submit(spec, client, *overrides):
    return await client.submit(load_spec(spec, overrides).model_dump(mode="json"))


async def test_a_paused_run_resumes_without_loss(plumbing, system):
    url = system.url
    async with AsyncClient(url) as client:
        run = await submit(plumbing, client, "trainer.steps=24", "rollout.partial_rollout=true")
        await wait_for(run, lambda view: view.step >= 3)
        await run.pause()
        assert run.state == "PAUSING"
        paused = await wait_for(run, is_in("PAUSED"))
        assert 3 <= paused.step < 24
        assert (await client.get_topology(run.id)).items == []
        assert [saved.step for saved in await run.checkpoints()] == [paused.step]
        await run.resume()
        await run.wait(timeout_s=120)
        kinds = {event.type async for event in run.events()}
        assert not kinds & {"Rewound", "WorkerLost"}
        assert check_run(system.state, run.id)["trained"] == 96

        forked = await run.fork({"trainer": {"steps": 27}}, name="longer")
        assert (await forked.wait(timeout_s=120)).step == 27
        longer = forked.id
    lines = slipstream("metrics", longer, "reward_mean", "--url", url).out.splitlines()
    assert len(lines) == 27
    assert "trained step 27" in slipstream("events", longer, "--url", url).out
    assert "trainer-0" in slipstream("logs", longer, "--tail", "1", "--url", url).out
    assert "longer" in slipstream("list", "--url", url).out


async def test_a_run_is_cancelled_after_its_step_with_a_checkpoint(plumbing, system):
    async with AsyncClient(system.url) as client:
        run = await submit(plumbing, client, "trainer.steps=100000")
        await wait_for(run, lambda view: view.step >= 2)
        await run.cancel(grace_seconds=60, save_checkpoint=True)
        assert run.state == "CANCELLING"
        ended_run = await wait_for(run, is_in("CANCELLED"))
        (saved,) = await run.checkpoints()
        assert (saved.step, saved.state) == (ended_run.step, "READY")
