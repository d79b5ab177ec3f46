"""Tests that the chat history keeps or drops reasoning as the chat template does."""

import pytest

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.extras.agents.agent import Agent
from services.extras.agents.record import EpisodeRecord
from services.extras.agents.requests import ChatRequest, Message
from tests.helpers.served_episode import Scripted, make_episode

# Like Qwen3's template: it renders reasoning only after the last question, in the tool calls that answer it.
TEMPLATE = """
{%- set last = namespace(question=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{ m.role }}: {% if m.reasoning_content and loop.index0 > last.question -%}
<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}|
{%- endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}
"""
USER, TOOL = (Message(role=role, content=role[0]) for role in ("user", "tool"))


@pytest.fixture
def tokenizer():
    loaded = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))
    loaded._inner.chat_template = TEMPLATE
    return loaded


async def play(tokenizer, new_messages, **options):
    """Sends the messages one by one with the history, and returns the episode and the engine's contexts."""
    engine = Scripted([f"<think>r{number}</think>a{number}" for number in range(len(new_messages))])
    episode = make_episode(engine)
    episode.tokenizer = tokenizer
    record = EpisodeRecord(episode, **options)
    messages = []
    for message in new_messages:
        messages.append(message)
        request = ChatRequest(model="policy", messages=tuple(messages))
        (choice,) = (await record.chat(request)).choices
        assert choice.message.reasoning_content.startswith("r")
        # Most agents do not send reasoning back.
        messages.append(choice.message.model_copy(update={"reasoning_content": None}))
    return episode, [tokenizer.decode(request.context_ids) for request in engine.requests]


async def test_reasoning_stays_within_the_calls_of_a_question(tokenizer) -> None:
    episode, contexts = await play(tokenizer, [USER, TOOL, TOOL])
    assert contexts[2] == (
        "user: u|assistant: <think>r0</think>a0|tool: t|assistant: <think>r1</think>a1|tool: t|assistant: "
    )
    assert (len(episode.conversations), episode.num_rewritten) == (1, 0)


async def test_reasoning_goes_with_the_next_question_in_a_new_conversation(tokenizer) -> None:
    episode, contexts = await play(tokenizer, [USER, TOOL, USER, TOOL])
    assert contexts[2] == "user: u|assistant: a0|tool: t|assistant: a1|user: u|assistant: "
    assert contexts[3] == f"{contexts[2]}<think>r2</think>a2|tool: t|assistant: "
    assert (len(episode.conversations), episode.num_rewritten) == (2, 1)


async def test_the_recorded_history_keeps_all_reasoning(tokenizer) -> None:
    episode, contexts = await play(tokenizer, [USER, USER, USER], history="recorded")
    assert contexts[2].count("<think>") == 2
    assert (len(episode.conversations), episode.num_rewritten) == (1, 0)


def test_an_unknown_history_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.workflow_arguments\.history"):
        Agent(agent="a:b", history="short")
