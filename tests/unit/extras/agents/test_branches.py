"""Episodes of several conversations: recording, training and interruptions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.extras.agents.agent import Agent
from services.extras.agents.trained import TrainedConversations
from services.rollout import metrics
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.workflows.base import Episode, Interrupted, WorkflowResources
from services.rollout.workflows.training import history_of
from services.rollout.workflows.turns import flattened, num_sampled, trained_once
from tests.helpers.served_episode import (
    TOKENIZER,
    Scripted,
    chat,
    client_of,
    make_episode,
    user,
)

Act = Callable[[Any], Any]


def shown(conversations: Any) -> list[str]:
    """Returns the texts of conversations, with sampled turns in brackets."""
    return [
        "".join(
            f"[{TOKENIZER.decode(turn.token_ids)}]"
            if turn.is_sampled
            else TOKENIZER.decode(turn.token_ids)
            for turn in conversation
        )
        for conversation in conversations
    ]


async def branch(client: Any) -> None:
    """Requests a reply, two continuations of it, and an independent question."""
    first = (await chat(client, user("x")))["choices"][0]["message"]
    await chat(client, user("helper"))
    await chat(client, user("x"), first, user("y"))
    await chat(client, user("x"), first, user("z"))


async def played(act: Act, lines: list[str], *, train: str = "all") -> Episode:
    episode = make_episode(Scripted(lines))
    async with client_of(episode) as client:
        await act(client)
    await TrainedConversations(train).choose(episode)
    return episode


async def test_all_conversations_train_and_each_sampled_token_once() -> None:
    episode = await played(branch, ["a", "h", "b", "c"])
    assert shown(trained_once(episode.sequences)) == [
        "user: x\nassistant: [a]\nuser: y\nassistant: [b]",
        "user: helper\nassistant: [h]",
        "user: x\nassistant: a\nuser: z\nassistant: [c]",
    ]
    assert episode.response_text == "c"


async def test_the_last_conversation_trains_unless_more_is_asked_for() -> None:
    before = metrics.UNUSED_AGENT_TOKENS._value.get()
    episode = await played(branch, ["a", "h", "b", "c"], train="last")
    assert shown(trained_once(episode.sequences)) == [
        "user: x\nassistant: [a]\nuser: z\nassistant: [c]"
    ]
    # "h" and "b" with their end tokens
    assert metrics.UNUSED_AGENT_TOKENS._value.get() - before == 4


async def test_every_choice_is_a_branch() -> None:
    async def act(client: Any) -> None:
        both = await chat(client, user("x"), n=3)
        await chat(client, user("x"), both["choices"][1]["message"], user("y"))

    episode = await played(act, ["a", "b", "c", "d"])
    assert shown(episode.sequences) == [
        "user: x\nassistant: [a]",
        "user: x\nassistant: [b]\nuser: y\nassistant: [d]",
        "user: x\nassistant: [c]",
    ]


async def test_a_rewritten_history_starts_another_sequence_and_is_counted() -> None:
    async def act(client: Any) -> None:
        first = (await chat(client, user("x")))["choices"][0]["message"]
        await chat(client, user("x"), {**first, "content": "A"}, user("y"))

    episode = await played(act, ["a", "b"])
    assert shown(episode.sequences) == [
        "user: x\nassistant: [a]",
        "user: x\nassistant: A\nuser: y\nassistant: [b]",
    ]
    assert episode.num_rewritten == 1
    assert (await played(branch, ["a", "h", "b", "c"])).num_rewritten == 0


async def test_rewards_see_the_other_conversations() -> None:
    history = history_of(await played(branch, ["a", "h", "b", "c"]))
    assert [message["content"] for message in history["messages"]][-1] == "c"
    others = [
        [m["content"] for m in other_conversation if "logprobs" in m]
        for other_conversation in history["other_conversations"]
    ]
    assert others == [["a", "b"], ["h"]]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
async def test_an_interrupted_episode_continues_with_all_its_conversations(cut: int) -> None:
    lines = ["first", "helper's", "second", "third"]
    whole = await played(branch, list(lines))
    interrupted = make_episode(Scripted(list(lines), cut=cut))
    with pytest.raises(Interrupted):
        async with client_of(interrupted) as client:
            await branch(client)
    turns = interrupted.recorded({})
    rest = Scripted([lines[cut - 1][3:], *lines[cut:]])
    resumed = make_episode(rest, recorded=turns)
    assert resumed.recorded({}) == turns
    async with client_of(resumed) as client:
        await branch(client)
    await TrainedConversations("all").choose(resumed)
    assert shown(resumed.sequences) == shown(whole.sequences)
    assert len(rest.requests) == 5 - cut
    assert num_sampled(flattened(trained_once(resumed.sequences))) == num_sampled(
        flattened(trained_once(whole.sequences))
    )


async def test_two_interruptions_in_a_row_lose_nothing() -> None:
    lines = ["first", "helper's", "second", "third"]
    first = make_episode(Scripted(list(lines), cut=4))
    with pytest.raises(Interrupted):
        async with client_of(first) as client:
            await branch(client)
    again = make_episode(Scripted([]), recorded=first.recorded({}))
    async with client_of(again) as client:
        await chat(client, user("x"))
    # The second attempt was interrupted before it requested the other replies.
    assert again.recorded({}) == first.recorded({})


CHOOSERS = """
def helpers(conversations, row):
    return [n for n, each in enumerate(conversations) if not each["is_last"]]

def wrong(conversations, row):
    return [7]

def broken(conversations, row):
    raise KeyError("no luck")
"""


@pytest.fixture
def choosers(tmp_path: Path) -> str:
    (tmp_path / "choosers.py").write_text(CHOOSERS)
    return str(tmp_path / "choosers.py")


async def test_a_function_selects_the_conversations_that_train(choosers: str) -> None:
    episode = await played(branch, ["a", "h", "b", "c"], train=f"{choosers}:helpers")
    assert shown(trained_once(episode.sequences)) == [
        "user: x\nassistant: [a]\nuser: y\nassistant: [b]",
        "user: helper\nassistant: [h]",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [("wrong", r"rollout\.workflow_arguments\.train.*\[7\]"), ("broken", "KeyError")],
)
async def test_a_function_that_chooses_wrongly_fails_its_sample_by_name(
    choosers: str, name: str, message: str
) -> None:
    with pytest.raises(CallError, match=message):
        await played(branch, ["a", "h", "b", "c"], train=f"{choosers}:{name}")


AGENT = """
import httpx

async def solve(base_url, api_key, model, prompt, row):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for text in ("one", "two"):
            body = {"model": model, "messages": [{"role": "user", "content": text}]}
            (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
"""


async def test_an_agent_reports_its_number_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    workflow = Agent(agent=f"{tmp_path / 'agent.py'}:solve", train="all")
    episode = make_episode(Scripted(["a", "b"]))
    async with workflow.serving(
        WorkflowResources(calls=CallPool(1), reach=AddressPolicy(["127.0.0.1"]))
    ):
        await workflow.run(episode)
    assert len(episode.sequences) == 2
    assert episode.measured == {"conversations": 2.0, "rewritten_histories": 0.0}
    with pytest.raises(ValueError, match=r"workflow_arguments\.train must be last, all or"):
        Agent(agent="a.py:b", train="first")
