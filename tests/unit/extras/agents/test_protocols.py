"""Tests of each protocol of the endpoint with the unmodified clients of OpenAI and Anthropic."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.extras.agents.endpoint import Access, Endpoint
from services.rollout.workflows.base import Episode
from tests.helpers.packages import install
from tests.helpers.served_episode import TOKENIZER, Scripted, client_of, make_episode, user

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def _openai(access: Access) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


def _anthropic(access: Access) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(
        base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key, max_retries=0
    )


@asynccontextmanager
async def _served(episode: Episode) -> AsyncIterator[Access]:
    async with (
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=1.0) as endpoint,
        endpoint.open(episode) as access,
    ):
        yield access


def _sampled(episode: Any) -> list[str]:
    return [TOKENIZER.decode(turn.token_ids) for turn in episode.turns if turn.is_sampled]


def _is_whole(engine: Scripted, episode: Any) -> bool:
    """Returns True if the last request ends with the tokens of all earlier turns."""
    turns = episode.turns[: 1 + max(at for at, turn in enumerate(episode.turns) if turn.is_sampled)]
    tokens = [token for turn in turns[:-1] for token in turn.token_ids]
    return list(engine.requests[-1].context_ids)[-len(tokens) :] == tokens


THEIRS = """
import json

from starlette.responses import JSONResponse

from services.extras.agents.protocols import AgentProtocol
from services.extras.agents.replies import CompletionFormatter
from services.extras.agents.requests import parse_chat
from services.extras.agents.session import new_id


async def ask(request, session):
    text = json.loads(await session.body(request))["ask"]
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    chat = parse_chat(json.dumps(body).encode())
    formatter = CompletionFormatter(
        chat, tokenizer=session.episode.tokenizer, reply_id=new_id("theirs-"), created=0
    )
    return await session.answer(chat, formatter)


PROTOCOL = AgentProtocol(
    paths={"/v1/theirs": ask}, error_body=lambda error: {"theirs": error.status}
)
"""


async def test_a_package_adds_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_protocol.py").write_text(THEIRS)
    install(
        tmp_path,
        monkeypatch,
        entry_points={"slipstream.protocols": {"theirs": "their_protocol:PROTOCOL"}},
    )
    engine = Scripted(["It is 3."])
    episode = make_episode(engine)
    async with _served(episode) as access, httpx.AsyncClient(base_url=access.base_url) as client:
        key = {"authorization": f"Bearer {access.api_key}"}
        reply = await client.post("/theirs", json={"ask": "1 + 2?"}, headers=key)
        refused = await client.post("/theirs", json={"ask": "1 + 2?"})
        absent = await client.post("/nobodys", json={}, headers=key)
    assert reply.json()["choices"][0]["message"]["content"] == "It is 3."
    assert _sampled(episode) == ["It is 3."]
    assert (refused.status_code, refused.json()) == (401, {"theirs": 401})
    assert absent.status_code == 404


@pytest.mark.parametrize("streams", [False, True])
async def test_messages_with_tools_over_two_turns(streams: bool) -> None:
    engine = Scripted([f"Let me add. {CALL}", "It is 3."])
    episode = make_episode(engine)
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages: list[Any] = [user("1 + 2?")]
    async with _served(episode) as access, _anthropic(access) as client:

        async def ask() -> Any:
            parameters = {
                "model": "policy",
                "max_tokens": 200,
                "system": "Add.",
                "messages": messages,
                "tools": tools,
            }
            if not streams:
                return await client.messages.create(**parameters)
            async with client.messages.stream(**parameters) as stream:
                return await stream.get_final_message()

        first = await ask()
        text, call = first.content
        assert (first.stop_reason, text.text) == ("tool_use", "Let me add.")
        assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = await ask()
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 3.")
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.output_tokens == len("It is 3.") + 1
    assert _sampled(episode) == [f"Let me add. {CALL}", "It is 3."]
    assert episode.num_rewritten == 0
    assert _is_whole(engine, episode)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_responses_with_tools_over_two_turns(streams: bool, is_stored: bool) -> None:
    engine = Scripted([f"Let me add. {CALL}", "It is 3."])
    episode = make_episode(engine)
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    async with _served(episode) as access, _openai(access) as client:

        async def ask(**parameters: Any) -> Any:
            parameters |= {"model": "policy", "instructions": "Add.", "tools": tools}
            if not streams:
                return await client.responses.create(**parameters)
            async with client.responses.stream(**parameters) as stream:
                return await stream.get_final_response()

        first = await ask(input="1 + 2?")
        message, call = first.output
        assert (first.status, message.content[0].text.strip()) == ("completed", "Let me add.")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if is_stored:
            second = await ask(input=[output], previous_response_id=first.id)
        else:
            items = [item.model_dump() for item in first.output]
            second = await ask(input=[user("1 + 2?"), *items, output])
    assert second.output_text == "It is 3."
    assert second.usage.output_tokens == len("It is 3.") + 1
    assert _sampled(episode) == [f"Let me add. {CALL}", "It is 3."]
    assert episode.num_rewritten == 0
    assert _is_whole(engine, episode)


async def test_a_reply_that_a_stop_sequence_or_the_limit_ends() -> None:
    episode = make_episode(Scripted(["abcdef", "abcdef"]))
    async with _served(episode) as access, _anthropic(access) as client:
        parameters = {"model": "policy", "messages": [user("x")]}
        stopped = await client.messages.create(**parameters, max_tokens=50, stop_sequences=["cd"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "cd")
        assert stopped.content[0].text == "ab"
        cut = await client.messages.create(**parameters, max_tokens=3)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")
        counted = await client.messages.count_tokens(**parameters)
        assert counted.input_tokens == cut.usage.input_tokens


async def test_a_response_at_the_limit_is_incomplete() -> None:
    async with _served(make_episode(Scripted(["abcdef"]))) as access, _openai(access) as client:
        response = await client.responses.create(model="policy", input="x", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.output_text == "abc"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": "claude"}, "claude"),
        ({"n": 2}, "n=2"),
        ({"temperature": 0.1}, "temperature"),
        ({"stop": ["a"]}, "stop"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "disable_parallel_tool_use",
        ),
        ({"messages": [user("x"), {"role": "assistant", "content": "pre"}]}, "messages.1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        ({"system": [{"type": "text", "text": None}]}, "system.0.text"),
    ],
)
async def test_messages_requests_with_unsupported_options_are_rejected(
    changes: dict[str, Any], name: str
) -> None:
    async with client_of(make_episode(Scripted(["a"]))) as http:
        body = {"model": "policy", "max_tokens": 5, "messages": [user("x")], **changes}
        response = await http.post("/messages", json=body)
    assert response.status_code in (400, 404)
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert name in error["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"top_p": 0.5}, "top_p"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"previous_response_id": "resp_x"}, "resp_x"),
        ({"input": []}, "messages"),
        ({"n": 2}, "n=2"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
async def test_responses_requests_with_unsupported_options_are_rejected(
    changes: dict[str, Any], name: str
) -> None:
    async with client_of(make_episode(Scripted(["a"]))) as http:
        response = await http.post("/responses", json={"model": "policy", "input": "x", **changes})
    assert response.status_code in (400, 404)
    assert name in response.json()["error"]["message"]


async def test_a_thread_is_refused_with_the_code_by_which_the_tool_runner_continues_without() -> (
    None
):
    async with client_of(make_episode(Scripted(["a"]))) as http:
        parameters = {"model": "policy", "max_tokens": 5, "messages": [user("x")]}
        response = await http.post("/messages", json={**parameters, "thread": {"type": "create"}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_wrong_key_is_rejected_in_each_protocols_form() -> None:
    async with client_of(make_episode(Scripted(["a"]))) as http:
        http.headers["Authorization"] = "Bearer wrong"
        response = await http.post("/messages", json={})
        assert (response.status_code, response.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        response = await http.post("/responses", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
