"""Episodes in environments: tokens, rewards, and reasons to end."""

from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.rollout import RewardSpec, SandboxSpec
from services.extras.bubblewrap import bubblewrap
from services.extras.environments.workflow import Environments
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import earned_terms, weighted_score
from services.rollout.sandbox.pool import EpisodeSandbox, SandboxPool
from services.rollout.sandbox.service import SandboxService
from services.rollout.workflows.base import Episode, Interrupted, WorkflowResources
from services.rollout.workflows.turns import num_sampled
from tests.helpers.served_episode import TOKENIZER, Scripted, make_episode

GAMES = """
import os

class Guess:
    TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

    def __init__(self, secret="7", tools=False):
        self.secret, self.tries, self.tools = secret, 0, tools

    def reset(self, task, *, seed):
        first = {"messages": "guess"}
        return {**first, "tools": [self.TOOL]} if self.tools else first

    def step(self, message):
        self.tries += 1
        self.message = message
        if message["content"] == "die":
            os._exit(3)
        is_right = message["content"] == self.secret
        calls = len(message.get("tool_calls", ()))
        return {
            "messages": "" if is_right else " no ",
            "done": is_right,
            "reward": {"right": float(is_right), "tries": -0.1},
            "metrics": {"tries_made": self.tries, "calls": calls},
        }

class Shell:
    def reset(self, task, *, seed, sandbox):
        sandbox.write("seven", "7")
        self.sandbox = sandbox
        return {"messages": "guess"}

    def step(self, message):
        result = self.sandbox.run(message["content"])
        return {"messages": result.text, "done": result.text == "7", "reward": result.exit_status}

class Silent(Guess):
    def step(self, message):
        return {"messages": "over", "done": True}
"""


@pytest.fixture
def games(tmp_path: Path) -> str:
    file = tmp_path / "games.py"
    file.write_text(GAMES)
    return str(file)


def rewritten(games: str, text: str) -> str:
    Path(games).write_text(text)
    return games


async def play(
    games: str,
    engine: Scripted,
    *,
    recorded: Any = (),
    room: int = 1000,
    sandbox: EpisodeSandbox | None = None,
    **changes: Any,
) -> Episode:
    arguments = {"environment": f"{games}:Guess", "chat": False, **changes}
    workflow = Environments(**arguments)
    episode = make_episode(engine, recorded=recorded, room=room)
    episode.sandbox = sandbox
    async with workflow.serving(WorkflowResources(calls=CallPool(1), reach=AddressPolicy())):
        try:
            await workflow.run(episode)
        except Interrupted:
            episode.turns = list(episode.recorded({}))
    return episode


def texts(episode: Episode) -> list[tuple[bool, str]]:
    return [(turn.is_sampled, episode.text(turn)) for turn in episode.turns]


async def test_only_the_policys_tokens_train(
    games: str,
) -> None:
    episode = await play(games, Scripted(["1", "7"]))
    assert texts(episode) == [(False, "guess"), (True, "1"), (False, " no "), (True, "7")]
    assert episode.prompt_ids == tuple(TOKENIZER.encode("guess"))
    assert num_sampled(episode.response_turns) == 4  # two digits and two end tokens
    spec = RewardSpec.model_validate(
        {"name": "environment", "terms": {"tries": {"weight": 0.5}, "never_named": {}}}
    )
    score = weighted_score([earned_terms(spec, episode.earned)])
    assert score.value == pytest.approx(1.0 - 0.5 * 0.2)
    assert score.terms == pytest.approx(
        {"right": 1.0, "tries": -0.2, "tries_made": 2.0, "calls": 0.0}
    )


async def test_an_interrupted_episode_is_played_again_without_sampling(games: str) -> None:
    cut = await play(games, Scripted(["1", "22222", "7"], cut=2))
    engine = Scripted(["2222", "7"])
    episode = await play(games, engine, recorded=cut.turns)
    replies = [text for is_sampled, text in texts(episode) if is_sampled]
    assert replies[0] == "1"
    assert replies[1].startswith("222")
    assert len(engine.requests) == 2
    assert episode.earned is not None


async def test_an_environment_with_other_messages_on_resume_is_rejected(games: str) -> None:
    cut = await play(games, Scripted(["1", "22222"], cut=2))
    games = rewritten(games, GAMES.replace('"guess"', '"riddle"'))
    with pytest.raises(CallError, match="resumed"):
        await play(games, Scripted([]), recorded=cut.turns)


async def test_limits_end_an_episode_with_its_reward(games: str) -> None:
    episode = await play(games, Scripted(["1", "2", "3"]), max_turns=2)
    assert episode.earned["reward"] == pytest.approx({"right": 0.0, "tries": -0.2})  # type: ignore[index]
    episode = await play(games, Scripted(["1", "2", "3"]), room=6)
    assert episode.is_full
    assert episode.finish_reason == "length"


async def test_tools_of_an_environment_are_offered_and_called(games: str) -> None:
    engine = Scripted(['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "7"])
    episode = await play(games, engine, chat=True, arguments={"tools": True})
    assert episode.earned["metrics"]["tries_made"] == 2  # type: ignore[index]
    assert TOKENIZER.decode(engine.requests[1].context_ids).endswith(" no \nassistant: ")


async def test_a_process_that_dies_fails_its_episodes_by_name_and_is_started_again(
    games: str,
) -> None:
    workflow = Environments(environment=f"{games}:Guess", chat=False)
    async with workflow.serving(WorkflowResources(calls=CallPool(1), reach=AddressPolicy())):
        with pytest.raises(CallError, match=r"games\.py:Guess'.*exit status 3") as caught:
            await workflow.run(make_episode(Scripted(["die"])))
        assert caught.value.kind == "sandbox_killed"
        episode = make_episode(Scripted(["7"]))
        await workflow.run(episode)
        assert episode.earned is not None


async def test_an_end_without_a_reward_is_no_reward_of_zero(games: str) -> None:
    with pytest.raises(CallError, match="reward"):
        await play(games, Scripted(["1"]), environment=f"{games}:Silent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "GAMES:Nothing"}, "has no 'Nothing'"),
        ({"environment": "--bind=127.0.0.1:0"}, "--bind"),
        ({"environment": "http://127.0.0.1:1"}, "reward_hosts"),
        ({"environment": "openenv+http://127.0.0.1:1"}, "reward_hosts"),
        (
            {"environment": "http://games.example", "arguments": {"a": 1}},
            r"rollout\.workflow_arguments\.arguments",
        ),
        ({"environment": "openenv+http://games", "arguments": {"a": 1}}, "action and observe"),
    ],
)
async def test_a_wrong_environment_is_found_before_the_run(
    games: str, changes: Any, message: str
) -> None:
    arguments = {"environment": f"{games}:Guess", **changes}
    arguments["environment"] = arguments["environment"].replace("GAMES", games)
    with pytest.raises(ValueError, match=message):
        async with Environments(**arguments).serving(
            WorkflowResources(calls=CallPool(1), reach=AddressPolicy())
        ):
            pass


@pytest.mark.parametrize(
    ("reset", "changes", "message"),
    [
        ('{"messages": "", "done": True, "reward": 1.0}', {}, "environment"),
        ('""', {}, "first messages have 0 tokens"),
        ('"x" * 20000', {}, "first messages have 20000 tokens"),
        ('"x" * 20000', {"chat": True}, "leaves no room"),
    ],
)
async def test_an_episode_without_tokens_left_for_the_policy_fails_with_the_reason(
    games: str, reset: str, changes: Any, message: str
) -> None:
    rewritten(games, f"class Guess:\n    def reset(self, task, *, seed):\n        return {reset}\n")
    with pytest.raises(CallError, match=message):
        await play(games, Scripted(["1"]), **changes)


@pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
async def test_an_environment_gets_the_sandbox_of_its_episode(games: str) -> None:
    service = SandboxService(SandboxPool(SandboxSpec()))
    async with service.serving("127.0.0.1:0", host="127.0.0.1"), service.open({}) as sandbox:
        engine = Scripted(["cat six; exit 2", "cat seven"])
        episode = await play(games, engine, sandbox=sandbox, environment=f"{games}:Shell")
    assert "No such file" in episode.text(episode.turns[2])
    assert episode.earned == {"reward": {"reward": 2.0}, "metrics": {}}
