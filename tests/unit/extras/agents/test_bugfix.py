"""Tests of the agent of `examples/bugfix` and its sandbox."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.callables import load_callable
from services.common.runspec.loader import load_spec
from services.extras.agents.agent import Agent
from services.extras.bubblewrap import bubblewrap
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService
from services.rollout.workflows.base import WorkflowResources
from tests.helpers.preflight import check
from tests.helpers.served_episode import Scripted, make_episode

EXAMPLE = Path(__file__).parents[4] / "examples" / "bugfix"


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
async def test_the_tests_in_the_sandbox_judge_each_script() -> None:
    spec = load_spec(EXAMPLE / "bugfix.yaml")
    row = load_callable(f"{EXAMPLE / 'bugfix.py'}:heldout")()[0]
    wrong = row["prompt"][-2]
    right = f"s/{wrong}/{row['answer']}/"
    workflow = Agent(agent=f"{EXAMPLE / 'bugfix.py'}:solve")
    assert spec.rollout.sandbox is not None
    service = SandboxService(SandboxPool(spec.rollout.sandbox))
    async with (
        workflow.serving(WorkflowResources(calls=CallPool(1), reach=AddressPolicy())),
        service.serving("127.0.0.1:0", host="127.0.0.1"),
    ):
        for replies, earned in (
            ([right], 1.0),
            (["1e cat /etc/passwd"], 0.0),
            ([f"s/{wrong}/{wrong}/"], 0.0),
        ):
            async with service.open(row) as sandbox:
                episode = make_episode(Scripted(replies))
                episode.prompt = replace(episode.prompt, text=row["prompt"], row=row)
                episode.sandbox = sandbox
                await workflow.run(episode)
            assert episode.earned == earned, replies


def test_its_specification_is_valid() -> None:
    check(load_spec(EXAMPLE / "bugfix.yaml"))


def test_held_out_bugs_are_not_trained() -> None:
    train, heldout = (
        {row["prompt"] for row in load_callable(f"{EXAMPLE / 'bugfix.py'}:{split}")()}
        for split in ("train", "heldout")
    )
    assert len(heldout) == 128
    assert not train & heldout
