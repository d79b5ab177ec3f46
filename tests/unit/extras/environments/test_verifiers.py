"""Tests of an unmodified `verifiers` environment that calls the policy over the agents' endpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.http.server import serve_http
from services.common.runspec.rollout import RewardSpec
from services.extras.agents.endpoint import Endpoint
from services.rollout.rewards.base import earned_terms, weighted_score
from tests.helpers.served_episode import Scripted, make_episode

# The import of verifiers takes six seconds of CPU time.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180)]

TASKSET = """
import httpx
from verifiers import v1 as vf

class EchoTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward(weight=2.0)
    async def says_it(self, trace) -> float:
        return float("moon" in trace.last_reply)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class EchoTasks(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for word in ("moon", "sun"):
            yield EchoTask(vf.TaskData(prompt=f"say {word}"), self.config.task)

class EchoHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        async with httpx.AsyncClient(timeout=30) as client:
            response = await client.post(
                f"{endpoint.rstrip('/')}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
            )
            response.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["EchoTasks", "EchoHarness"]
"""


async def test_its_rewards_are_terms_and_its_tokens_are_exact(
    tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("verifiers.v1")
    from services.extras.environments.verifiers import play, tasks_of

    (tmp_path / "echo_tasks_for_test.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = {"agent": {"runtime": {"type": "subprocess"}}}
    rows = tasks_of("echo_tasks_for_test", arguments, limit=None)
    assert [row["prompt"] for row in rows] == ["say moon", "say sun"]
    engine = Scripted(["the moon"])
    episode = make_episode(engine)
    endpoint = Endpoint("", temperature=1.0)
    async with serve_http("127.0.0.1:0", endpoint.app()) as port, endpoint.open(episode) as access:
        earned = await play(
            f"http://127.0.0.1:{port}/v1", access.api_key, access.model, "say moon", rows[0]
        )
    score = weighted_score([earned_terms(RewardSpec(name="environment"), earned)])
    assert score.value == 2.0
    assert score.terms["says_it"] == 2.0
    assert score.terms["length"] == 8.0
    assert episode.text(episode.turns[-1]) == "the moon"
    del sys.modules["echo_tasks_for_test"]
