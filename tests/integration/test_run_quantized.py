"""Rollouts in FP8: a correction accounts for them, and they use the trainer's precision if they diverge."""

import json
from pathlib import Path

import pytest

from slipstream_client import AsyncClient
from tests.integration.test_run_life import is_in, submit, wait_for

pytestmark = pytest.mark.timeout(300)


async def steps_of(run) -> list[dict[str, float]]:
    return [event.data async for event in run.events() if event.type == "StepCommitted"]


async def test_a_run_trains_with_fp8_rollouts(plumbing: Path, system) -> None:
    async with AsyncClient(system.url) as client:
        run = await submit(plumbing, client, "rollout.quantization=fp8_block", "trainer.steps=3")
        ended_run = await wait_for(run, is_in("SUCCEEDED", "FAILED"))
        assert ended_run.state == "SUCCEEDED", ended_run.message
        steps = await steps_of(run)
        assert len(steps) == 3
        assert all(0 < step["kl_rollout"] < 0.1 and step["ess"] < 1 for step in steps)
        fresh = [step["kl_rollout_by_staleness/0"] for step in steps[:1]]
        assert all(value > 0 for value in fresh)


async def test_rollouts_that_diverge_restart_in_the_trainers_precision(
    plumbing: Path, system
) -> None:
    async with AsyncClient(system.url) as client:
        run = await submit(
            plumbing,
            client,
            "rollout.quantization=fp8",
            "rollout.max_mismatch=1e-7",
            "algorithm.max_staleness=0",
            "trainer.steps=8",
        )
        ended_run = await wait_for(run, is_in("SUCCEEDED", "FAILED"))
        assert ended_run.state == "SUCCEEDED", ended_run.message
        kinds = [event.type async for event in run.events()]
        assert kinds.count("QuantizationEnded") == kinds.count("RolloutsRestarted") == 1
        assert not {"WorkerLost", "Rewound"} & {*kinds}
        steps = await steps_of(run)
        assert len(steps) == 8
        assert all(step["rollout_logprob_abs_diff"] > 1e-4 for step in steps[:5])
        assert all(step["rollout_logprob_abs_diff"] < 1e-5 for step in steps[5:])
        spec = json.loads(ended_run.spec) if isinstance(ended_run.spec, str) else ended_run.spec
        assert spec["rollout"].get("quantization") is None
        assert spec["algorithm"]["correction"] == "decoupled"
