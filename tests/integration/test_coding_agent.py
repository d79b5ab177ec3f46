"""A third-party coding agent, unchanged except for base URL and key, works in the sandbox of its episode.

The tests need ``mini-swe-agent``, one of the development tools.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.runspec.rollout import SandboxSpec
from services.extras.agents.agent import Agent
from services.extras.bubblewrap import bubblewrap
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService
from services.rollout.workflows.base import WorkflowResources
from services.rollout.workflows.turns import token_ids
from tests.helpers.served_episode import Scripted, make_episode

pytest.importorskip("minisweagent", reason="needs mini-swe-agent")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap"),
]

AGENT = '''
import os

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


class SandboxEnvironment(LocalEnvironment):
    """Runs the agent's commands in the sandbox of its episode."""

    def __init__(self, sandbox):
        super().__init__()
        self.sandbox = sandbox

    def execute(self, action, cwd="", *, timeout=None):
        result = self.sandbox.run(action["command"], timeout_s=timeout or self.config.timeout)
        output = {"output": result.text, "returncode": result.exit_status, "exception_info": ""}
        self._check_finished(output)
        return output


def solve(base_url, api_key, model, prompt, row, sandbox):
    sandbox.write("calc.py", row["code"])
    agent = DefaultAgent(
        LitellmModel(
            model_name=f"openai/{model}", model_kwargs={"api_base": base_url, "api_key": api_key}
        ),
        SandboxEnvironment(sandbox),
        system_template="You fix bugs.",
        instance_template="{{task}}",
    )
    result = agent.run(prompt)
    passed = sandbox.run("python3 -c 'from calc import f; assert f(3, 4) == 7'").exit_status == 0
    return {"reward": float(passed), "metrics": {"submitted": result["exit_status"] == "Submitted"}}
'''

COMMANDS = (
    "ls",
    "cat calc.py",
    "sed -i 's/-/+/' calc.py",
    "python3 -c 'from calc import f; print(f(3, 4))'",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)


class Kept(Scripted):
    """Fake engine that generates given lines and records its results by context."""

    def __init__(self, lines) -> None:
        super().__init__(lines)
        self.results = {}

    async def generate(self, request):
        result = await super().generate(request)
        self.results[request.context_ids] = result
        return result


async def test_mini_swe_agent_fixes_a_bug_in_its_sandbox(tmp_path: Path) -> None:
    (tmp_path / "coder.py").write_text(AGENT)
    calls = [
        json.dumps({"name": "bash", "arguments": {"command": command}}) for command in COMMANDS
    ]
    engine = Kept([f"Step {n}.<tool_call>{call}</tool_call>" for n, call in enumerate(calls)])
    episode = make_episode(engine, room=8000)
    episode.prompt = replace(
        episode.prompt,
        text="f(3, 4) must be 7.",
        row={"code": "def f(a, b):\n    return a - b\n"},
    )
    workflow = Agent(agent=f"{tmp_path / 'coder.py'}:solve", timeout_s=300)
    service = SandboxService(SandboxPool(SandboxSpec()))
    async with (
        workflow.serving(WorkflowResources(calls=CallPool(1), reach=AddressPolicy())),
        service.serving("127.0.0.1:0", host="127.0.0.1"),
        service.open({}) as sandbox,
    ):
        episode.sandbox = sandbox
        await workflow.run(episode)
    assert episode.earned == {"reward": 1.0, "metrics": {"submitted": True}}
    assert sandbox.measured["sandbox_commands"] == len(COMMANDS) + 1
    (conversation,) = episode.sequences
    sampled = [index for index, turn in enumerate(conversation) if turn.is_sampled]
    assert len(sampled) == len(COMMANDS)
    for index in sampled:
        turn, result = conversation[index], engine.results[token_ids(conversation[:index])]
        assert turn.token_ids == result.token_ids
        assert turn.logprobs == result.logprobs
        assert turn.version_runs == result.version_runs
    observed = episode.text(conversation[sampled[-1] - 1])
    assert "<returncode>0</returncode>" in observed
    assert "7" in observed
    assert episode.num_rewritten == 0
