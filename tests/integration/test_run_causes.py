"""A run that fails in user code reports the reward, the exception and the prompt."""

from pathlib import Path

import pytest

from slipstream_client import AsyncClient
from tests.integration.test_run_life import is_in, submit, wait_for

pytestmark = pytest.mark.timeout(300)


async def failure_of(url: str, plumbing: Path, *overrides: str) -> tuple[str, set[str]]:
    """Returns the message of a failed run and the types of its events."""
    async with AsyncClient(url) as client:
        run = await submit(plumbing, client, *overrides)
        ended_run = await wait_for(run, is_in("SUCCEEDED", "FAILED"))
        assert (ended_run.state, ended_run.state_reason) == ("FAILED", "GenerationError"), (
            ended_run.message
        )
        assert ended_run.error is not None
        assert ended_run.error.category == "USER"
        return ended_run.message, {event.type async for event in run.events()}


async def test_a_reward_that_always_raises_is_the_cause(plumbing, system, tmp_path):
    (tmp_path / "broken.py").write_text("def score(*given):\n    raise KeyError('gold')\n")
    message, kinds = await failure_of(
        system.url, plumbing, f'rollout.rewards=[{{"name": "{tmp_path}/broken.py:score"}}]'
    )
    assert "broken.py:score' raised KeyError: 'gold'" in message
    assert "row " in message
    assert "bug in the service" not in message
    assert not kinds & {"WorkerLost", "Rewound", "Restarted"}


async def test_prompts_that_are_all_too_long_are_the_cause(plumbing, system):
    message, kinds = await failure_of(system.url, plumbing, "data.max_prompt_tokens=2")
    assert "prompt_too_long" in message
    assert "data.max_prompt_tokens" in message
    assert not kinds & {"WorkerLost", "Rewound", "Restarted"}


async def test_a_run_that_trains_nothing_reports_the_cause(plumbing, system, tmp_path):
    (tmp_path / "same.py").write_text("def score(*given):\n    return 0.5\n")
    async with AsyncClient(system.url) as client:
        reward = f'rollout.rewards=[{{"name": "{tmp_path}/same.py:score"}}]'
        run = await submit(plumbing, client, reward, "trainer.steps=3")
        ended_run = await wait_for(run, is_in("SUCCEEDED", "FAILED"))
        assert ended_run.state == "SUCCEEDED", ended_run.message
        (event,) = [event async for event in run.events() if event.type == "NothingLearned"]
        assert event.data["reason"] in {"EqualRewards", "AllTruncated"}
        assert ended_run.summary["nothing_learned"]["message"] == event.message
